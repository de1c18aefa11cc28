#include "text/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "text/value_format.h"

namespace mlcpipe::chat {

namespace {

constexpr uint32_t kFirstStandIn = 0x1D800, kLastStandIn = 0x1D9FF;  // STAND_INS of template_sandbox.py

class Reader {
 public:
  Reader(Heap* heap, std::string_view text, std::string_view name) : heap_(heap), text_(text), name_(name) {}

  Value ReadAll() {
    if (text_.size() > Limits::kInputBytes) throw Wrong("at most " + std::to_string(Limits::kInputBytes >> 20) + " MiB");
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
      while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' && static_cast<unsigned char>(text_[at_]) >= 32) ++at_;
      out.append(text_.substr(begin, at_ - begin));
      if (at_ >= text_.size()) throw Wrong("the end of a text");
      if (static_cast<unsigned char>(text_[at_]) < 32) throw Wrong("a text without control characters");
      if (Skip("\\")) ReadEscape(&out);
    }
    ++at_;
    return out;
  }

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

class JsonWriter {
 public:
  JsonWriter(Heap* heap, const JsonStyle& style) : heap_(heap), style_(style) {}

  void Write(const Value& value, int level) {
    switch (value.kind) {
      case Kind::kNone:
        return Put("null");
      case Kind::kBool:
        return Put(value.truth ? "true" : "false");
      case Kind::kInt:
        return Put(std::to_string(value.integer));
      case Kind::kFloat:
        return Put(Number(value.number));
      case Kind::kString:
        return Quoted(value.text());
      case Kind::kList:
      case Kind::kTuple:
        return WriteList(value.list->span, level);
      case Kind::kDict:
        return WriteObject(*value.dict, level);
      default:
        Fail("TypeError", std::string("Object of type ") + TypeName(value.kind) + " is not JSON serializable");
    }
  }

  std::string Take() { return std::move(out_); }

 private:
  Heap* heap_;
  const JsonStyle& style_;
  std::string out_;

  void Put(std::string_view text) {
    heap_->TickBytes(text.size());
    out_ += text;
    heap_->FitText(out_.size() / 4);
  }

  static std::string Number(double number) {
    if (std::isnan(number)) return "NaN";
    if (std::isinf(number)) return number < 0 ? "-Infinity" : "Infinity";
    return FloatText(number);
  }

  void Line(int level) {
    if (!style_.lines) return;
    Put("\n");
    for (int i = 0; i < level; ++i) Put(style_.indent);
  }

  void WriteList(Span span, int level) {
    if (span.size == 0) return Put("[]");
    Put("[");
    for (size_t i = 0; i < span.size; ++i) {
      if (i) Put(style_.item);
      Line(level + 1);
      Write(span[i], level + 1);
    }
    Line(level);
    Put("]");
  }

  void WriteObject(const Dict& dict, int level) {
    if (dict.size == 0) return Put("{}");
    std::vector<uint32_t> order(dict.size);
    for (uint32_t i = 0; i < dict.size; ++i) order[i] = i;
    if (style_.sort_keys) {
      std::stable_sort(order.begin(), order.end(),
                       [&](uint32_t a, uint32_t b) { return Less(heap_, dict.keys[a], dict.keys[b]); });
    }
    Put("{");
    for (uint32_t i = 0; i < dict.size; ++i) {
      if (i) Put(style_.item);
      Line(level + 1);
      Key(dict.keys[order[i]]);
      Put(style_.key);
      Write(dict.values[order[i]], level + 1);
    }
    Line(level);
    Put("}");
  }

  void Key(const Value& key) {
    if (key.is(Kind::kString)) return Quoted(key.text());
    if (!key.is_number() && !key.is(Kind::kNone)) {
      Fail("TypeError", std::string("keys must be str, int, float, bool or None, not ") + TypeName(key.kind));
    }
    Put("\"");
    Write(key, 0);
    Put("\"");
  }

  void Escaped(uint32_t unit, std::string* out) {
    char text[16];
    std::snprintf(text, sizeof text, "\\u%04x", unit);
    *out += text;
  }

  void Quoted(std::string_view text) {
    static constexpr char kChars[] = "\"\\\b\f\n\r\t", kNames[] = "\"\\bfnrt";
    std::string made = "\"";
    for (size_t at = 0; at < text.size();) {
      size_t begin = at;
      uint32_t code = utf8::Next(text, &at);
      const char* found = code && code < 128 ? std::strchr(kChars, static_cast<int>(code)) : nullptr;
      if (found) {
        made += '\\';
        made += kNames[found - kChars];
      } else if (code < 32) {
        Escaped(code, &made);
      } else if (!style_.ascii || code < 128 || (code >= kFirstStandIn && code <= kLastStandIn)) {
        made.append(text.substr(begin, at - begin));
      } else if (code < 0x10000) {
        Escaped(code, &made);
      } else {
        Escaped(0xD800 + ((code - 0x10000) >> 10), &made);
        Escaped(0xDC00 + ((code - 0x10000) & 0x3FF), &made);
      }
    }
    Put(made += '"');
  }
};

}  // namespace

Value ReadJson(Heap* heap, std::string_view text, std::string_view name) { return Reader(heap, text, name).ReadAll(); }

std::string WriteJson(Heap* heap, const Value& value, const JsonStyle& style) {
  JsonWriter writer(heap, style);
  writer.Write(value, 0);
  return writer.Take();
}

}  // namespace mlcpipe::chat
