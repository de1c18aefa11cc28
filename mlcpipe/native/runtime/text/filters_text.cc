// Filters of texts and numbers.
#include <charconv>
#include <cmath>

#include "text/filters.h"
#include "text/json.h"
#include "text/value_access.h"
#include "text/value_format.h"
#include "text/value_strings.h"

namespace mlcpipe::chat {

namespace {

constexpr int64_t kMaxJsonStep = 16;     // characters of an indent or separator
constexpr int64_t kMaxWidth = 10'000;    // MAX_WIDTH of template_sandbox.py
constexpr size_t kMaxIntDigits = 4300;   // more are no integer for Python
constexpr int64_t kTruncateLeeway = 5;
constexpr int64_t kMaxDecimals = 300;

// As jinja2's soft_str: a safe text stays one.
Value Soft(Heap* heap, const Value& value) { return value.is(Kind::kString) ? value : ToString(heap, value); }

// The text of a number, or an empty one where it is none.
std::string_view NumberText(Heap* heap, const Value& value) {
  std::string_view text = Strip(heap, value, None(), 3).text();
  bool plain = true, letters = false;
  for (size_t at = 0; at < text.size();) {
    uint32_t code = utf8::Next(text, &at);
    if (code > 127 && !heap->characters.Is(Class::kDecimal, code)) return "";
    std::string_view of_numbers = "0123456789_.eE+-";
    letters = letters || (code < 128 && of_numbers.find(static_cast<char>(code)) == std::string_view::npos);
    plain = plain && code < 128 && code != '_';
  }
  if (!plain && letters) return "";
  if (!plain) Stop("a number in other characters than ASCII digits");
  return text;
}

Value ToFloat(Heap* heap, const Value& value, const Value* args) {
  double number = 0;
  if (value.is(Kind::kUndefined)) FailUndefined(value);
  if (value.is_number()) return Float(value.as_number());
  if (value.is(Kind::kString) && ParseFloat(NumberText(heap, value), &number)) return Float(number);
  return args[0];
}

Value Whole(double number) {
  if (!(std::fabs(number) < 0x1p63)) Stop("an integer of more than 64 bits");
  return Int(static_cast<int64_t>(number));
}

Value ToInt(Heap* heap, const Value& value, const Value* args) {
  if (value.is(Kind::kUndefined)) FailUndefined(value);
  if (!args[1].is(Kind::kInt) || args[1].integer != 10) Stop("the filter int with a base");
  if (value.is_integer()) return Int(value.as_integer());
  if (value.is(Kind::kFloat)) {
    if (std::isinf(value.number)) Fail("OverflowError", "cannot convert float infinity to integer");
    return std::isnan(value.number) ? args[0] : Whole(value.number);
  }
  if (!value.is(Kind::kString)) return args[0];
  std::string_view text = NumberText(heap, value);
  std::string_view digits = text.substr(!text.empty() && (text[0] == '+' || text[0] == '-'));
  bool whole = !digits.empty() && digits.find_first_not_of("0123456789") == std::string_view::npos;
  if (whole && digits.size() <= kMaxIntDigits) {
    int64_t integer = 0;
    std::string_view signed_digits = text[0] == '+' ? digits : text;
    auto error = std::from_chars(signed_digits.data(), signed_digits.data() + signed_digits.size(), integer).ec;
    if (error != std::errc()) Stop("an integer of more than 64 bits");
    return Int(integer);
  }
  double number = 0;
  bool is_number = ParseFloat(text, &number);
  return is_number && std::isfinite(number) ? Whole(number) : args[0];
}

Value Absolute(Heap*, const Value& value, const Value*) {
  if (value.is(Kind::kFloat)) return Float(std::fabs(value.number));
  bool negative = value.is_integer() && value.as_integer() < 0;
  return negative ? Negate(value) : value.is(Kind::kBool) ? Int(value.truth) : Negate(Negate(value));
}

Value RoundHalf(const Value& value, int64_t precision) {
  if (!value.is_number()) {
    Fail("TypeError", std::string("type ") + TypeName(value.kind) + " doesn't define __round__ method");
  }
  if (precision < 0) Stop("round before the point");
  if (value.is_integer()) return Int(value.as_integer());
  if (!std::isfinite(value.number) || precision > kMaxDecimals) return value;
  double number = 0;
  ParseFloat(Printed(value.number, 'f', static_cast<int>(precision)), &number);
  return Float(number);
}

Value Round(Heap* heap, const Value& value, const Value* args) {
  int64_t precision = ToIndex(args[0]);
  std::string_view method = args[1].is(Kind::kString) ? args[1].text() : "";
  if (precision > kMaxWidth || precision < -kMaxWidth) Stop("round by more than " + std::to_string(kMaxWidth));
  if (method == "common") return RoundHalf(value, precision);
  if (method != "ceil" && method != "floor") Fail("FilterArgumentError", "method must be common, ceil or floor");
  Value scale = Apply(heap, Operator::kPower, Int(10), Int(precision));
  Value scaled = Apply(heap, Operator::kMultiply, value, scale);
  double number = scaled.as_number();
  if (scaled.is(Kind::kFloat)) scaled = Whole(method == "ceil" ? std::ceil(number) : std::floor(number));
  return Apply(heap, Operator::kDivide, scaled, scale);
}

Value Indent(Heap* heap, const Value& value, const Value* args) {
  if (value.is(Kind::kUndefined)) FailUndefined(value);
  if (!value.is(Kind::kString)) Fail("TypeError", "indent of anything but text");
  int64_t width = args[0].is(Kind::kString) ? args[0].string->chars : ToIndex(args[0]);
  if (width > kMaxWidth || width < -kMaxWidth) Stop("indent by more than " + std::to_string(kMaxWidth));
  std::string step(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  if (args[0].is(Kind::kString)) step = std::string(args[0].text());
  Value ended = heap->String(std::string(value.text()) + "\n");
  std::string out = Truth(args[1]) ? step : "";
  bool blank = Truth(args[2]), first = true;
  for (const Value& line : SplitLines(heap, ended, false)) {
    if (!first) out += "\n";
    if (!first && (blank || line.string->bytes)) out += step;
    out += line.text();
    heap->TickBytes(step.size());
    heap->FitText(out.size() / 4);
    first = false;
  }
  return heap->String(out, value.safe);
}

Value ToJson(Heap* heap, const Value& value, const Value* args) {
  JsonStyle style;
  style.ascii = Truth(args[0]);
  style.lines = !args[1].is(Kind::kNone);
  if (args[1].is(Kind::kString)) style.indent = std::string(args[1].text());
  int64_t step = args[1].is(Kind::kString) ? args[1].string->chars : style.lines ? ToIndex(args[1]) : 0;
  if (step > kMaxJsonStep) Stop("tojson with an indent over 16 characters");
  if (args[1].is_integer()) style.indent = std::string(static_cast<size_t>(std::max<int64_t>(step, 0)), ' ');
  if (style.lines) style.item = ",";
  if (!args[2].is(Kind::kNone)) {
    Span parts = Iterate(heap, args[2]);
    if (parts.size != 2 || !parts[0].is(Kind::kString) || !parts[1].is(Kind::kString)) {
      Fail("ValueError", "two separators");
    }
    if (parts[0].string->chars > kMaxJsonStep || parts[1].string->chars > kMaxJsonStep) {
      Stop("tojson with a separator over 16 characters");
    }
    style.item = std::string(parts[0].text());
    style.key = std::string(parts[1].text());
  }
  style.sort_keys = Truth(args[3]);
  return heap->String(WriteJson(heap, value, style));
}

// The first letter of each word in capitals: words end at spaces and at - ( { [ <.
Value TitleWords(Heap* heap, const Value& value, const Value*) {
  Value soft = Soft(heap, value);
  std::string_view text = soft.text();
  std::string out;
  size_t begin = 0;
  auto flush = [&](size_t end) {
    if (end <= begin) return;
    std::string_view word = text.substr(begin, end - begin);
    size_t first = ByteOf(word, 1);
    out += heap->characters.Upper(word.substr(0, first)) + heap->characters.Lower(word.substr(first));
  };
  for (size_t at = 0; at < text.size();) {
    size_t here = at;
    uint32_t code = utf8::Next(text, &at);
    bool ends = IsSpace(code) || code == '-' || code == '(' || code == '{' || code == '[' || code == '<';
    if (!ends) continue;
    flush(here);
    out += text.substr(here, at - here);
    begin = at;
  }
  flush(text.size());
  return heap->String(out);
}

Value Truncate(Heap* heap, const Value& value, const Value* args) {
  int64_t length = ToIndex(args[0]), leeway = args[3].is(Kind::kNone) ? kTruncateLeeway : ToIndex(args[3]);
  if (!args[2].is(Kind::kString)) Fail("TypeError", "truncate with an end that is no text");
  auto end = static_cast<int64_t>(args[2].string->chars), size = static_cast<int64_t>(LengthOf(value));
  if (length < end || leeway < 0) Fail("AssertionError", "expected length >= " + std::to_string(end));
  if (size <= length + leeway) return value;
  Value kept = Slice(heap, value, None(), Int(length - end), None());
  if (!kept.is(Kind::kString)) Fail("TypeError", "truncate of anything but text");
  size_t space = Truth(args[1]) ? std::string_view::npos : kept.text().rfind(' ');
  if (space != std::string_view::npos) kept = heap->Part(kept, 0, space);
  return Apply(heap, Operator::kAdd, kept, args[2]);
}

Value Replaced(Heap* heap, const Value& value, const Value* args) {
  int64_t count = args[2].is(Kind::kNone) ? -1 : ToIndex(args[2]);
  return Replace(heap, ToString(heap, value), ToString(heap, args[0]), ToString(heap, args[1]), count);
}

Value MakeSafe(Heap* heap, const Value& value, const Value*) {
  Value text = ToString(heap, value);
  text.safe = true;
  return text;
}

template <std::string (Characters::*change)(std::string_view) const>
Value Changed(Heap* heap, const Value& value, const Value*) {
  Value text = Soft(heap, value);
  heap->TickBytes(8 * uint64_t{text.string->bytes});
  return heap->String((heap->characters.*change)(text.text()), text.safe);
}

#define MLCPIPE_FILTER [](Heap * heap, const Value& value, const Value* args) -> Value
#define MLCPIPE_UNUSED (void)heap, (void)args

constexpr Filter kFilters[] = {
    {"abs", 0, Absolute},
    {"capitalize", 0, Changed<&Characters::Capitalize>},
    {"center", 1, MLCPIPE_FILTER { return Center(heap, Soft(heap, value), ToIndex(args[0]), " ", '^'); }},
    {"default", 2, MLCPIPE_FILTER {
       MLCPIPE_UNUSED;
       return value.is(Kind::kUndefined) || (Truth(args[1]) && !Truth(value)) ? args[0] : value;
     }},
    {"escape", 0, MLCPIPE_FILTER { MLCPIPE_UNUSED; return Escape(heap, value); }},
    {"float", 1, ToFloat},
    {"forceescape", 0, MLCPIPE_FILTER { MLCPIPE_UNUSED; return Escape(heap, ToString(heap, value)); }},
    {"indent", 3, Indent},
    {"int", 2, ToInt},
    {"lower", 0, Changed<&Characters::Lower>},
    {"replace", 3, Replaced},
    {"round", 2, Round},
    {"safe", 0, MakeSafe},
    {"string", 0, MLCPIPE_FILTER { MLCPIPE_UNUSED; return Soft(heap, value); }},
    {"title", 0, TitleWords},
    {"tojson", 4, ToJson},
    {"trim", 1, MLCPIPE_FILTER { return Strip(heap, Soft(heap, value), args[0], 3); }},
    {"truncate", 4, Truncate},
    {"upper", 0, Changed<&Characters::Upper>},
};

}  // namespace

View<Filter> TextFilters() { return {kFilters, std::size(kFilters)}; }

}  // namespace mlcpipe::chat
