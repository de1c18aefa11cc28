// Python's str and repr.
#include <clocale>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "text/template_objects.h"
#include "text/value_format.h"

namespace mlcpipe::chat {

namespace {

// Text that grows within the limits.
class Writer {
 public:
  explicit Writer(Heap* heap) : heap_(heap) {}

  void Write(const Value& value);
  std::string Take() { return std::move(out_); }

 private:
  Heap* heap_;
  std::string out_;

  void Put(std::string_view text) {
    heap_->TickBytes(text.size());
    out_ += text;
    heap_->FitText(out_.size() / 4);  // a character has at most 4 bytes
  }
  void Items(Span span, const char* open, const char* close);
  void Quoted(std::string_view text);
  void Object(const Dict& dict);
};

void Writer::Items(Span span, const char* open, const char* close) {
  Put(open);
  for (size_t i = 0; i < span.size; ++i) {
    if (i) Put(", ");
    Write(span[i]);
  }
  Put(close);
}

void Writer::Object(const Dict& dict) {
  Put("{");
  for (uint32_t i = 0; i < dict.size; ++i) {
    if (i) Put(", ");
    Write(dict.keys[i]);
    Put(": ");
    Write(dict.values[i]);
  }
  Put("}");
}

void Writer::Quoted(std::string_view text) {
  bool single = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  char quote = single ? '"' : '\'';
  std::string made(1, quote);
  char code_text[16];
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    uint32_t code = utf8::Next(text, &at);
    if (code == '\n' || code == '\r' || code == '\t') {
      made += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
    } else if (code == static_cast<unsigned char>(quote) || code == '\\') {
      made += '\\';
      made += static_cast<char>(code);
    } else if (code < 32 || code == 127 || (code > 127 && heap_->characters.Is(Class::kUnprintable, code))) {
      std::snprintf(code_text, sizeof code_text, code < 256 ? "\\x%02x" : code < 65536 ? "\\u%04x" : "\\U%08x", code);
      made += code_text;
    } else {
      made.append(text.substr(begin, at - begin));
    }
  }
  Put(made + quote);
}

void Writer::Write(const Value& value) {
  switch (value.kind) {
    case Kind::kMissing:
    case Kind::kUndefined:
      return Put("Undefined");
    case Kind::kString:
      if (value.safe) Put("Markup(");
      Quoted(value.text());
      return Put(value.safe ? ")" : "");
    case Kind::kList:
      return Items(value.list->span, "[", "]");
    case Kind::kTuple:
      return Items(value.list->span, "(", value.list->span.size == 1 ? ",)" : ")");
    case Kind::kDict:
      return Object(*value.dict);
    case Kind::kView: {
      static const char* const kOpen[] = {"dict_keys([", "dict_values([", "dict_items(["};
      return Items(Iterate(heap_, value), kOpen[value.view->what], "])");
    }
    case Kind::kMacro:
    case Kind::kLoop:
      return Put(Describe(heap_, value));
    case Kind::kNamespace:
      return Put("<Namespace>");
    case Kind::kFunction:
    case Kind::kMethod:
      Stop("a function written as text");
    default:
      return Put(ToString(heap_, value).text());
  }
}

std::string RangeText(const Range& range) {
  int64_t stop = range.stop;
  std::string text = "range(" + std::to_string(range.start) + ", " + std::to_string(stop);
  return text + (range.step == 1 ? ")" : ", " + std::to_string(range.step) + ")");
}

// "5.684e-14" becomes "5.685e-14"; false for nines alone.
bool Increment(std::string* digits) {
  for (size_t at = digits->find('e'); at-- > 0;) {
    char& digit = (*digits)[at];
    if (digit == '.') continue;
    if (digit != '9') {
      ++digit;
      return true;
    }
    digit = '0';
  }
  return false;
}

// The fewest digits that give the same number, in scientific notation; of several such the nearest. The C library prints
// them: std::to_chars would link tables of 0.1 MB.
std::string ShortestDigits(double magnitude) {
  const auto gives = [&](const std::string& text) {
    double same = 0;
    return ParseFloat(text, &same) && same == magnitude;
  };
  // A decimal number of 15 digits is in the first 15 digits of a normal number.
  for (int places = magnitude < std::numeric_limits<double>::min() ? 0 : 14; places < 16; ++places) {
    std::string text = Printed(magnitude, 'e', places);
    if (gives(text)) {
      if (!places) return text;
      const size_t mark = text.find('e'), last = text.find_last_not_of("0", mark - 1);
      const size_t zeros = text[last] == '.' ? last : last + 1;
      return text.erase(zeros, mark - zeros);
    }
    if (places == 15 && Increment(&text) && gives(text)) return text;  // a power of two has more room above
  }
  return Printed(magnitude, 'e', 16);
}

}  // namespace

const Value* Arguments::Named(std::string_view name) const {
  for (const auto& [key, value] : named) {
    if (key == name) return &value;
  }
  return nullptr;
}

std::string Repr(Heap* heap, const Value& value) {
  Writer writer(heap);
  writer.Write(value);
  return writer.Take();
}

Value ToString(Heap* heap, const Value& value) {
  switch (value.kind) {
    case Kind::kString: {
      Value text = value;
      text.safe = false;
      return text;
    }
    case Kind::kMissing:
    case Kind::kUndefined:
      return heap->String("");
    case Kind::kNone:
      return heap->String("None");
    case Kind::kBool:
      return heap->String(value.truth ? "True" : "False");
    case Kind::kInt:
      return heap->String(std::to_string(value.integer));
    case Kind::kFloat:
      return heap->String(FloatText(value.number));
    case Kind::kRange:
      return heap->String(RangeText(*value.range));
    default:
      return heap->String(Repr(heap, value));
  }
}

std::string Printed(double number, char form, int precision) {
  const char* format = form == 'e' ? "%.*e" : form == 'f' ? "%.*f" : "%.*g";
  std::string text(static_cast<size_t>(std::snprintf(nullptr, 0, format, precision, number)), '\0');
  std::snprintf(text.data(), text.size() + 1, format, precision, number);
  const std::string_view point = std::localeconv()->decimal_point;
  if (const size_t at = text.find(point); at != std::string::npos) text.replace(at, point.size(), ".");
  return text;
}

std::string FloatText(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  std::string text = (std::signbit(number) ? "-" : "") + ShortestDigits(std::fabs(number));
  size_t mark = text.find('e');
  int exponent = std::atoi(text.c_str() + mark + 1);
  if (exponent >= 16 || exponent < -4) return text;
  std::string sign = text[0] == '-' ? "-" : "", mantissa = text.substr(sign.size(), mark - sign.size());
  if (mantissa.size() > 1) mantissa.erase(1, 1);  // the point
  auto places = static_cast<int>(mantissa.size());
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + mantissa;
  if (places <= exponent + 1) {
    return sign + mantissa + std::string(static_cast<size_t>(exponent + 1 - places), '0') + ".0";
  }
  return sign + mantissa.insert(static_cast<size_t>(exponent + 1), ".");
}

bool ParseFloat(std::string_view text, double* number) {
  std::string copy(text);
  size_t sign = !copy.empty() && (copy[0] == '-' || copy[0] == '+');
  bool digits = copy.find_first_of("0123456789") == sign || copy.compare(sign, 1, ".") == 0;
  if (digits && copy.find_first_not_of("0123456789.eE+-") == std::string::npos) {
    size_t point = copy.find('.');
    if (point != std::string::npos) copy.replace(point, 1, std::localeconv()->decimal_point);
    char* end = nullptr;
    *number = std::strtod(copy.c_str(), &end);
    return end == copy.c_str() + copy.size();
  }
  std::string word;
  for (char c : copy.substr(sign)) word += static_cast<char>(c >= 'A' && c <= 'Z' ? c ^ 32 : c);
  bool infinite = word == "inf" || word == "infinity";
  if (!infinite && word != "nan") return false;
  *number = infinite ? HUGE_VAL : std::nan("");
  if (copy[0] == '-') *number = -*number;
  return true;
}

Value Escape(Heap* heap, const Value& value) {
  if (value.is(Kind::kString) && value.safe) return value;
  std::string out;
  Value plain = ToString(heap, value);
  std::string_view text = plain.text();
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    uint32_t code = utf8::Next(text, &at);
    for (auto [stand_in, meant] : heap->stand_ins) code = code == stand_in ? meant : code;
    const char* entity = code == '&'    ? "&amp;"
                         : code == '<'  ? "&lt;"
                         : code == '>'  ? "&gt;"
                         : code == '\'' ? "&#39;"
                         : code == '"'  ? "&#34;"
                                        : nullptr;
    out += entity ? std::string_view(entity) : text.substr(begin, at - begin);
  }
  return heap->String(out, true);
}

}  // namespace mlcpipe::chat
