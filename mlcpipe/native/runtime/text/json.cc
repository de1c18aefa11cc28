#include "text/json.h"

#include <charconv>
#include <cstring>

#include "text/value_format.h"

namespace mlcpipe::chat {

namespace {

class Reader {
 public:
  Reader(Heap* heap, std::string_view text, std::string_view name) : heap_(heap), text_(text), name_(name) {}

  Value ReadAll() {
    if (text_.size() > Limits::kInputBytes) {
      throw Wrong("at most " + std::to_string(Limits::kInputBytes >> 20) + " MiB");
    }
    if (utf8::ValidPrefix(text_) != text_.size()) throw Wrong("UTF-8");
    Value value = ReadValue(0);
    Spaces();
    if (at_ != text_.size()) throw Wrong("an end");
    return value;
  }

 private:
  Heap* heap_;
  std::string_view text_, name_;
  size_t at_ = 0;

  Error Wrong(std::string expected) const {
    return Error(Code::kUsage, "JSON that cannot be read")
        .Where(std::string(name_) + " at byte " + std::to_string(at_))
        .Expected(std::move(expected));
  }

  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void Spaces() {
    while (at_ < text_.size() && std::strchr(" \t\n\r", text_[at_]) && text_[at_]) ++at_;
  }
  bool Skip(std::string_view word) {
    if (text_.compare(at_, word.size(), word) != 0) return false;
    at_ += word.size();
    return true;
  }

  Value ReadValue(uint32_t depth) {
    if (depth > Limits::kDepth) throw Wrong("at most " + std::to_string(Limits::kDepth) + " levels");
    heap_->Tick();
    Spaces();
    char c = Peek();
    if (c == '{') return ReadObject(depth);
    if (c == '[') return ReadList(depth);
    if (c == '"') return heap_->String(ReadString());
    if (Skip("true")) return Bool(true);
    if (Skip("false")) return Bool(false);
    if (Skip("null")) return None();
    if (c == '-' || (c >= '0' && c <= '9')) return ReadNumber();
    throw Wrong("a value");
  }

  // After an item: whether another one follows.
  bool Another(char close) {
    Spaces();
    if (Skip(",")) return true;
    if (Peek() != close) throw Wrong(std::string("',' or '") + close + "'");
    ++at_;
    return false;
  }

  Value ReadList(uint32_t depth) {
    std::vector<Value> items;
    ++at_;
    Spaces();
    if (Skip("]")) return heap_->Copied(Kind::kList, items);
    do {
      items.push_back(ReadValue(depth + 1));
      heap_->FitItems(items.size());
    } while (Another(']'));
    return heap_->Copied(Kind::kList, items);
  }

  Value ReadObject(uint32_t depth) {
    Dict* dict = heap_->New<Dict>();
    ++at_;
    Spaces();
    if (Skip("}")) return heap_->Object(dict);
    do {
      Spaces();
      if (Peek() != '"') throw Wrong("a key");
      Value key = heap_->String(ReadString());
      Spaces();
      if (!Skip(":")) throw Wrong("':'");
      dict->Set(heap_, key, ReadValue(depth + 1));
    } while (Another('}'));
    return heap_->Object(dict);
  }

  uint32_t ReadHex() {
    uint32_t code = 0;
    const char* begin = text_.data() + at_;
    if (text_.size() - at_ < 4) throw Wrong("four hexadecimal digits");
    auto [end, error] = std::from_chars(begin, begin + 4, code, 16);
    if (error != std::errc() || end != begin + 4) throw Wrong("four hexadecimal digits");
    at_ += 4;
    return code;
  }

  void ReadEscape(std::string* out) {
    static constexpr char kNames[] = "\"\\/bfnrt", kChars[] = "\"\\/\b\f\n\r\t";
    char c = Peek();
    ++at_;
    if (const char* found = c ? std::strchr(kNames, c) : nullptr) {
      out->push_back(kChars[found - kNames]);
      return;
    }
    if (c != 'u') throw Wrong("an escape");
    uint32_t code = ReadHex();
    if (code >= 0xD800 && code < 0xDC00 && Skip("\\u")) {
      uint32_t low = ReadHex();
      if (low < 0xDC00 || low >= 0xE000) throw Wrong("a pair of surrogates");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code >= 0xD800 && code < 0xE000) throw Wrong("a pair of surrogates");
    utf8::Append(out, code);
  }

  std::string ReadString() {
    std::string out;
    ++at_;
    while (Peek() != '"') {
      size_t begin = at_;
      while (at_ < text_.size() && IsPlain(text_[at_])) ++at_;
      out.append(text_.substr(begin, at_ - begin));
      if (at_ >= text_.size()) throw Wrong("the end of a text");
      if (static_cast<unsigned char>(text_[at_]) < 32) throw Wrong("a text without control characters");
      if (Skip("\\")) ReadEscape(&out);
    }
    ++at_;
    return out;
  }

  static bool IsPlain(char c) { return c != '"' && c != '\\' && static_cast<unsigned char>(c) >= 32; }

  size_t Digits() {
    size_t begin = at_;
    while (Peek() >= '0' && Peek() <= '9') ++at_;
    if (at_ == begin) throw Wrong("a digit");
    return at_ - begin;
  }

  Value ReadNumber() {
    size_t begin = at_;
    Skip("-");
    bool zero = Peek() == '0';
    if (Digits() > 1 && zero) throw Wrong("a number without leading zeros");
    bool whole = true;
    if (Skip(".")) whole = Digits() == 0;
    if (Peek() == 'e' || Peek() == 'E') {
      ++at_;
      if (!Skip("+")) Skip("-");
      whole = Digits() == 0;
    }
    std::string_view digits = text_.substr(begin, at_ - begin);
    int64_t integer = 0;
    if (whole) {
      auto error = std::from_chars(digits.data(), digits.data() + digits.size(), integer).ec;
      if (error != std::errc()) throw Wrong("an integer of 64 bits");
      return Int(integer);
    }
    double number = 0;
    if (!ParseFloat(digits, &number)) throw Wrong("a number");
    return Float(number);
  }
};

}  // namespace

Value ReadJson(Heap* heap, std::string_view text, std::string_view name) { return Reader(heap, text, name).ReadAll(); }

}  // namespace mlcpipe::chat
