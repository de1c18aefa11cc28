#include <algorithm>
#include <cmath>
#include <cstring>

#include "text/json.h"
#include "text/value_format.h"

namespace mlcpipe::chat {

namespace {

constexpr uint32_t kFirstStandIn = 0x1D800, kLastStandIn = 0x1D9FF;  // STAND_INS of template_sandbox.py

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

std::string WriteJson(Heap* heap, const Value& value, const JsonStyle& style) {
  JsonWriter writer(heap, style);
  writer.Write(value, 0);
  return writer.Take();
}

}  // namespace mlcpipe::chat
