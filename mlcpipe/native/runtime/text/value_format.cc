// Python's `%` and str.format.
#include "text/value_format.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace mlcpipe::chat {

namespace {

constexpr int kMaxWidth = 9999;

// The text between `%` and the type, or behind the colon of a field.
struct Spec {
  std::string fill = " ";
  char align = 0, sign = '-', type = 0;
  bool alternate = false, zero = false, commas = false;
  int width = 0, precision = -1;
};

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// As `_WIDE_FORMAT` of template_sandbox.py.
void CheckWidths(std::string_view format) {
  int digits = 0;
  bool spec = false;
  for (char c : format) {
    digits = IsDigit(c) ? digits + 1 : 0;
    if (digits == 5 || c == '*' || (spec && c == '{')) Stop("a format wider than " + std::to_string(kMaxWidth));
    spec = c == ':' || (spec && c != '{' && c != '}');
  }
}

int ReadNumber(std::string_view text, size_t* at) {
  int number = 0;
  for (; *at < text.size() && IsDigit(text[*at]); ++*at) number = number * 10 + (text[*at] - '0');
  return number;
}

std::string Padded(std::string text, const Spec& spec, char align) {
  size_t chars = CountChars(text), width = static_cast<size_t>(spec.width);
  if (chars >= width) return text;
  size_t missing = width - chars, left = align == '>' || align == '=' ? missing : align == '^' ? missing / 2 : 0;
  auto fill = [&](size_t count) {
    std::string made;
    while (count--) made += spec.fill;
    return made;
  };
  if (align == '=') {
    size_t sign = text.find_first_not_of("+- ");
    sign = sign == std::string::npos ? 0 : sign;
    bool base = text.compare(sign, 1, "0") == 0 && sign + 1 < text.size();
    if (base && std::string_view("xXob").find(text[sign + 1]) != std::string_view::npos) sign += 2;
    return text.substr(0, sign) + fill(missing) + text.substr(sign);
  }
  return fill(left) + text + fill(missing - left);
}

std::string WithSign(bool negative, const std::string& digits, const Spec& spec) {
  return (negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "") + digits;
}

std::string WithCommas(const std::string& digits) {
  size_t whole = std::min(digits.find_first_not_of("0123456789"), digits.size());
  std::string made = digits;
  for (size_t at = whole; at > 3; at -= 3) made.insert(at - 3, ",");
  return made;
}

void MakeUpper(std::string* text) {
  for (char& c : *text) c = static_cast<char>(c >= 'a' ? c ^ 32 : c);
}

std::string IntegerText(int64_t integer, const Spec& spec) {
  auto magnitude = integer < 0 ? 0 - static_cast<uint64_t>(integer) : static_cast<uint64_t>(integer);
  int base = spec.type == 'x' || spec.type == 'X' ? 16 : spec.type == 'o' ? 8 : spec.type == 'b' ? 2 : 10;
  char digits[72];
  std::string text(digits, std::to_chars(digits, digits + sizeof digits, magnitude, base).ptr);
  if (spec.type == 'X') MakeUpper(&text);
  if (spec.commas) text = WithCommas(text);
  if (spec.alternate && base != 10) text = std::string("0") + spec.type + text;
  return WithSign(integer < 0, text, spec);
}

std::string FloatDigits(double number, const Spec& spec) {
  char type = static_cast<char>(spec.type | 32);
  double magnitude = std::fabs(number) * (spec.type == '%' ? 100 : 1);
  std::string text;
  if (!std::isfinite(number)) {
    text = std::isnan(number) ? "nan" : "inf";
  } else if (spec.type == 0 && spec.precision < 0) {
    text = FloatText(magnitude);
  } else {
    const char form = type == 'e' ? 'e' : type == 'f' || spec.type == '%' ? 'f' : 'g';
    text = Printed(magnitude, form, spec.precision < 0 ? 6 : spec.precision);
    if (spec.type == 0 && text.find_first_of(".e") == std::string::npos) text += ".0";
  }
  if (spec.type >= 'A' && spec.type <= 'Z') MakeUpper(&text);
  if (spec.commas) text = WithCommas(text);
  return WithSign(std::signbit(number) && !std::isnan(number), text, spec) + (spec.type == '%' ? "%" : "");
}

std::string Truncated(std::string text, const Spec& spec) {
  if (spec.precision >= 0) text.resize(ByteOf(text, static_cast<size_t>(spec.precision)));
  return text;
}

bool IsFloatType(char type) { return type != 0 && std::string_view("eEfFgG").find(type) != std::string_view::npos; }

[[noreturn]] void WrongType(char type, const Value& value) {
  Fail("TypeError", std::string("%") + type + " format: a number is required, not " + TypeName(value.kind));
}

std::string PercentField(Heap* heap, const Spec& spec, const Value& value) {
  char align = spec.align == '<' ? '<' : spec.zero && spec.type != 's' && spec.type != 'r' ? '=' : '>';
  if (spec.type == 's') return Padded(Truncated(std::string(ToString(heap, value).text()), spec), spec, align);
  if (spec.type == 'r') return Padded(Truncated(Repr(heap, value), spec), spec, align);
  if (!value.is_number()) WrongType(spec.type, value);
  Spec number = spec;
  if (spec.zero && align == '=') number.fill = "0";
  if (IsFloatType(spec.type)) {
    if (!std::isfinite(value.as_number())) number.fill = " ";
    return Padded(FloatDigits(value.as_number(), spec), number, align == '=' && number.fill == " " ? '>' : align);
  }
  if (spec.precision >= 0) Stop("a precision of an integer in a format");
  if (value.is(Kind::kFloat) && (spec.type == 'x' || spec.type == 'X' || spec.type == 'o')) WrongType(spec.type, value);
  if (value.is(Kind::kFloat) && !(std::fabs(value.number) < 0x1p63)) {
    Fail("OverflowError", "cannot convert float to integer");
  }
  int64_t integer = value.is(Kind::kFloat) ? static_cast<int64_t>(value.number) : value.as_integer();
  return Padded(IntegerText(integer, number), number, align);
}

// Reads a specification of `%`, behind its key; `at` is then behind the type.
Spec ReadPercent(std::string_view format, size_t* at) {
  Spec spec;
  for (; *at < format.size() && std::string_view("-+ #0").find(format[*at]) != std::string_view::npos; ++*at) {
    char flag = format[*at];
    if (flag == '-') spec.align = '<';
    if (flag == '+' || (flag == ' ' && spec.sign != '+')) spec.sign = flag;
    if (flag == '#') spec.alternate = true;
    if (flag == '0') spec.zero = true;
  }
  spec.width = ReadNumber(format, at);
  if (*at < format.size() && format[*at] == '.') {
    ++*at;
    spec.precision = ReadNumber(format, at);
  }
  if (*at >= format.size()) Fail("ValueError", "incomplete format");
  spec.type = format[(*at)++];
  if (spec.type == 'i' || spec.type == 'u') spec.type = 'd';
  if (std::string_view("srdxXoeEfFgG%").find(spec.type) == std::string_view::npos) {
    if (spec.type == 'c' || spec.type == 'a') Stop(std::string("%") + spec.type + " in a format");
    Fail("ValueError", std::string("unsupported format character '") + spec.type + "'");
  }
  if (spec.alternate && IsFloatType(spec.type)) Stop("# in the format of a number");
  return spec;
}

Spec ReadBrace(std::string_view text) {
  Spec spec;
  size_t at = 0;
  size_t first = text.empty() ? 0 : ByteOf(text, 1);
  auto is_align = [&](size_t i) {
    return i < text.size() && std::string_view("<>=^").find(text[i]) != std::string_view::npos;
  };
  if (first && is_align(first)) {
    spec.fill = std::string(text.substr(0, first));
    spec.align = text[first];
    at = first + 1;
  } else if (is_align(0)) {
    spec.align = text[at++];
  }
  if (at < text.size() && std::string_view("+- ").find(text[at]) != std::string_view::npos) spec.sign = text[at++];
  if (at < text.size() && text[at] == '#') spec.alternate = ++at;
  if (at < text.size() && text[at] == '0') {
    ++at;
    spec.zero = true;
    if (!spec.align) spec.fill = "0";
  }
  spec.width = ReadNumber(text, &at);
  if (at < text.size() && text[at] == ',') spec.commas = ++at;
  if (at < text.size() && text[at] == '.') {
    ++at;
    spec.precision = ReadNumber(text, &at);
  }
  if (at < text.size()) spec.type = text[at++];
  if (at != text.size()) Fail("ValueError", "Invalid format specifier");
  if (spec.commas && spec.zero) Stop("a format with zeros and commas");
  return spec;
}

std::string BraceField(Heap* heap, std::string_view text, const Value& value) {
  if (text.empty()) return std::string(ToString(heap, value).text());
  Spec spec = ReadBrace(text);
  char number_align = spec.align ? spec.align : spec.zero ? '=' : '>';
  if (value.is(Kind::kString)) {
    if ((spec.type && spec.type != 's') || spec.sign != '-' || spec.alternate || spec.commas || spec.align == '=') {
      Fail("ValueError", "Unknown format code for object of type 'str'");
    }
    return Padded(Truncated(std::string(value.text()), spec), spec, spec.align ? spec.align : '<');
  }
  if (!value.is_number()) {
    Fail("TypeError", std::string("unsupported format string passed to ") + TypeName(value.kind) + ".__format__");
  }
  bool of_float = IsFloatType(spec.type) || spec.type == '%';
  if (value.is(Kind::kFloat) || of_float) {
    if (spec.type && !of_float) Fail("ValueError", "Unknown format code for object of type 'float'");
    if (spec.alternate) Stop("# in the format of a number");
    return Padded(FloatDigits(value.as_number(), spec), spec, number_align);
  }
  if (spec.type == 'c' || spec.type == 'n') Stop("a format of type " + std::string(1, spec.type));
  if (spec.precision >= 0 || (spec.type && std::string_view("dxXob").find(spec.type) == std::string_view::npos)) {
    Fail("ValueError", "Unknown format code for object of type 'int'");
  }
  return Padded(IntegerText(value.as_integer(), spec), spec, number_align);
}

// The argument that a field names, of which `automatic` counts those without a name.
Value FieldValue(std::string_view name, const Arguments& arguments, int* automatic) {
  if (name.find_first_of(".[") != std::string_view::npos) Stop("a format field with attributes");
  bool numbered = std::all_of(name.begin(), name.end(), IsDigit);
  if (!numbered) {
    const Value* named = arguments.Named(name);
    if (!named) Fail("KeyError", "'" + std::string(name) + "'");
    return *named;
  }
  size_t at = 0;
  if (name.empty() ? *automatic < 0 : *automatic > 0) Fail("ValueError", "cannot switch field numbering");
  int index = name.empty() ? (*automatic)++ : ReadNumber(name, &at);
  if (!name.empty()) *automatic = -1;
  if (static_cast<size_t>(index) >= arguments.positional.size()) Fail("IndexError", "Replacement index out of range");
  return arguments.positional[static_cast<size_t>(index)];
}

std::string OneField(Heap* heap, std::string_view field, const Arguments& arguments, int* automatic) {
  size_t colon = std::min(field.find(':'), field.size()), mark = std::min(field.find('!'), colon);
  Value value = FieldValue(field.substr(0, mark), arguments, automatic);
  if (mark != colon) {
    std::string_view conversion = field.substr(mark + 1, colon - mark - 1);
    if (conversion == "a") Stop("!a in a format");
    if (conversion != "r" && conversion != "s") Fail("ValueError", "Unknown conversion specifier");
    value = conversion == "s" ? ToString(heap, value) : heap->String(Repr(heap, value));
  }
  return BraceField(heap, colon < field.size() ? field.substr(colon + 1) : "", value);
}

}  // namespace

Value PercentFormat(Heap* heap, const Value& format, const Value& argument) {
  std::string_view text = format.text();
  CheckWidths(text);
  if (format.safe) Stop("a format of a safe text");
  Span given = argument.is(Kind::kTuple) ? argument.list->span : Span{&argument, 1};
  size_t used = 0;
  bool named = false;
  std::string out;
  for (size_t at = 0; at < text.size();) {
    size_t mark = std::min(text.find('%', at), text.size());
    out += text.substr(at, mark - at);
    at = mark + 1;
    if (mark == text.size()) break;
    Value value;
    if (at < text.size() && text[at] == '(') {
      size_t end = text.find(')', at);
      if (!argument.is(Kind::kDict)) Fail("TypeError", "format requires a mapping");
      if (end == std::string_view::npos) Fail("ValueError", "incomplete format key");
      Value key = heap->String(text.substr(at + 1, end - at - 1));
      const Value* found = argument.dict->Find(heap, key);
      if (!found) Fail("KeyError", Repr(heap, key));
      value = *found;
      named = true;
      at = end + 1;
    }
    Spec spec = ReadPercent(text, &at);
    if (spec.type == '%') {
      out += '%';
      continue;
    }
    if (value.is(Kind::kMissing)) {
      if (used == given.size) Fail("TypeError", "not enough arguments for format string");
      value = given[used++];
    }
    out += PercentField(heap, spec, value);
    heap->FitText(out.size() / 4);
  }
  bool mapping = argument.is(Kind::kDict) || argument.is(Kind::kList);
  if (used < given.size && !mapping && !named) {
    Fail("TypeError", "not all arguments converted during string formatting");
  }
  return heap->String(out);
}

Value BraceFormat(Heap* heap, const Value& format, const Arguments& arguments) {
  std::string_view text = format.text();
  CheckWidths(text);
  if (format.safe) Stop("a format of a safe text");
  int automatic = 0;
  std::string out;
  for (size_t at = 0; at < text.size();) {
    size_t mark = std::min(text.find_first_of("{}", at), text.size());
    out += text.substr(at, mark - at);
    at = mark + 1;
    if (mark == text.size()) break;
    if (at < text.size() && text[at] == text[mark]) {
      out += text[at++];
      continue;
    }
    size_t end = text.find('}', at);
    if (text[mark] == '}' || end == std::string_view::npos) {
      Fail("ValueError", "Single '{' or '}' encountered in format string");
    }
    out += OneField(heap, text.substr(at, end - at), arguments, &automatic);
    heap->FitText(out.size() / 4);
    at = end + 1;
  }
  return heap->String(out);
}

}  // namespace mlcpipe::chat
