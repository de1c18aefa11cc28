#include "text/value_access.h"

#include <algorithm>
#include <cmath>

#include "text/value_format.h"
#include "text/value_methods.h"

namespace mlcpipe::chat {

namespace {

constexpr int64_t kExactInteger = int64_t{1} << 53;
constexpr size_t kMaxParts = 1000;  // of an attribute

[[noreturn]] void TooLarge() { Stop("an integer of more than 64 bits"); }

[[noreturn]] void NoOperator(Operator op, const Value& left, const Value& right) {
  static const char* const kNames[] = {"+", "-", "*", "/", "//", "%", "**"};
  if (left.is(Kind::kUndefined)) FailUndefined(left);
  if (right.is(Kind::kUndefined)) FailUndefined(right);
  Fail("TypeError", std::string("unsupported operand type(s) for ") + kNames[static_cast<int>(op)] + ": '" +
                        TypeName(left.kind) + "' and '" + TypeName(right.kind) + "'");
}

Value PowerOf(int64_t base, int64_t exponent) {
  if (base == 0 || base == 1) return Int(exponent == 0 ? 1 : base);
  if (base == -1) return Int(exponent % 2 ? -1 : 1);
  int64_t result = 1;
  for (; exponent > 0; --exponent) {  // ends after 63 rounds
    if (__builtin_mul_overflow(result, base, &result)) TooLarge();
  }
  return Int(result);
}

Value OfIntegers(Operator op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool divides = op == Operator::kDivide || op == Operator::kFloorDivide || op == Operator::kModulo;
  if (divides && b == 0) Fail("ZeroDivisionError", "division by zero");
  switch (op) {
    case Operator::kAdd:
      return __builtin_add_overflow(a, b, &result) ? (TooLarge(), None()) : Int(result);
    case Operator::kSubtract:
      return __builtin_sub_overflow(a, b, &result) ? (TooLarge(), None()) : Int(result);
    case Operator::kMultiply:
      return __builtin_mul_overflow(a, b, &result) ? (TooLarge(), None()) : Int(result);
    case Operator::kDivide:
      if (std::max(std::abs(static_cast<double>(a)), std::abs(static_cast<double>(b))) > kExactInteger) TooLarge();
      return Float(static_cast<double>(a) / static_cast<double>(b));
    case Operator::kFloorDivide:
      if (b == -1) return __builtin_sub_overflow(0, a, &result) ? (TooLarge(), None()) : Int(result);
      return Int(a / b - (a % b != 0 && (a % b < 0) != (b < 0)));
    case Operator::kModulo:
      if (b == -1) return Int(0);
      result = a % b;
      return Int(result != 0 && (result < 0) != (b < 0) ? result + b : result);
    default:
      if (b >= 0) return PowerOf(a, b);
      if (a == 0) Fail("ZeroDivisionError", "0.0 cannot be raised to a negative power");
      return Float(std::pow(static_cast<double>(a), static_cast<double>(b)));
  }
}

Value OfFloats(Operator op, double a, double b) {
  bool divides = op == Operator::kDivide || op == Operator::kFloorDivide || op == Operator::kModulo;
  if (divides && b == 0) Fail("ZeroDivisionError", "float division by zero");
  switch (op) {
    case Operator::kAdd:
      return Float(a + b);
    case Operator::kSubtract:
      return Float(a - b);
    case Operator::kMultiply:
      return Float(a * b);
    case Operator::kDivide:
      return Float(a / b);
    case Operator::kPower: {
      if (a == 0 && b < 0) Fail("ZeroDivisionError", "0.0 cannot be raised to a negative power");
      if (a < 0 && std::isfinite(b) && b != std::floor(b)) Stop("a complex number");
      double power = std::pow(a, b);
      if (std::isinf(power) && std::isfinite(a) && std::isfinite(b)) Fail("OverflowError", "Result too large");
      return Float(power);
    }
    default: {
      double rest = std::fmod(a, b), whole = (a - rest) / b;
      if (rest != 0 && (rest < 0) != (b < 0)) {
        rest += b;
        whole -= 1;
      }
      if (rest == 0) rest = std::copysign(0.0, b);
      if (op == Operator::kModulo) return Float(rest);
      double down = std::floor(whole);
      if (whole == 0) return Float(std::copysign(0.0, a / b));
      return Float(whole - down > 0.5 ? down + 1 : down);
    }
  }
}

Value Repeat(Heap* heap, const Value& value, int64_t times) {
  auto count = static_cast<uint64_t>(std::max<int64_t>(times, 0));
  uint64_t size = value.is(Kind::kString) ? value.string->bytes : value.list->span.size, total = 0;
  if (__builtin_mul_overflow(size, count, &total)) total = UINT64_MAX;
  if (value.is(Kind::kString)) {
    heap->FitText(total / 4);
    std::string text;
    for (uint64_t i = 0; i < count && size; ++i) text += value.text();
    return heap->String(text, value.safe);
  }
  heap->FitItems(total);
  Value* items = heap->New<Value>(total);
  for (uint64_t i = 0; i < total; ++i) items[i] = value.list->span[i % size];
  return heap->Sequence(value.kind, items, total);
}

Value AddTexts(Heap* heap, Value left, Value right) {
  bool safe = left.safe || right.safe;
  if (left.safe != right.safe) (left.safe ? right : left) = Escape(heap, left.safe ? right : left);
  heap->FitText(uint64_t{left.string->chars} + right.string->chars);
  return heap->String(std::string(left.text()) += right.text(), safe);
}

Value AddSequences(Heap* heap, const Value& left, const Value& right) {
  Span a = left.list->span, b = right.list->span;
  heap->FitItems(a.size + b.size);
  Value* items = heap->New<Value>(a.size + b.size);
  std::copy(b.begin(), b.end(), std::copy(a.begin(), a.end(), items));
  return heap->Sequence(left.kind, items, a.size + b.size);
}

// The items of a slice: the first, how many, and how far apart.
struct Cut {
  int64_t start, count, step;
};

Cut CutOf(int64_t size, const Value& start, const Value& stop, const Value& step) {
  auto index = [&](const Value& value, int64_t otherwise, int64_t low, int64_t high) {
    if (value.is(Kind::kNone)) return otherwise;
    if (!value.is_integer()) {
      if (value.is(Kind::kUndefined)) FailUndefined(value);
      Fail("TypeError", "slice indices must be integers or None or have an __index__ method");
    }
    int64_t at = value.as_integer();
    return std::min(std::max(at < 0 ? at + size : at, low), high);
  };
  int64_t by = step.is(Kind::kNone) ? 1 : step.is_integer() ? step.as_integer() : 0;
  if (!step.is(Kind::kNone) && !step.is_integer()) Fail("TypeError", "slice indices must be integers or None");
  if (by == 0) Fail("ValueError", "slice step cannot be zero");
  by = std::min(std::max(by, -(size + 1)), size + 1);  // no larger step gives more
  int64_t low = by < 0 ? -1 : 0, high = by < 0 ? size - 1 : size;
  int64_t first = index(start, by < 0 ? high : low, low, high), last = index(stop, by < 0 ? low : high, low, high);
  int64_t count = by < 0 ? (first - last - by - 1) / -by : (last - first + by - 1) / by;
  return {first, std::max<int64_t>(count, 0), by};
}

Value CutText(Heap* heap, const Value& text, const Cut& cut) {
  std::string_view all = text.text();
  heap->TickBytes(all.size());
  bool ascii = text.string->ascii();
  auto byte = [&](int64_t index) { return ascii ? static_cast<size_t>(index) : ByteOf(all, static_cast<size_t>(index)); };
  if (cut.step == 1) {
    size_t begin = byte(cut.start), end = byte(cut.start + cut.count);
    return heap->Part(text, begin, end - begin);
  }
  std::vector<size_t> begins;
  for (size_t at = 0; at < all.size(); utf8::Next(all, &at)) begins.push_back(at);
  begins.push_back(all.size());
  std::string made;
  for (int64_t i = 0; i < cut.count; ++i) {
    auto at = static_cast<size_t>(cut.start + i * cut.step);
    made += all.substr(begins[at], begins[at + 1] - begins[at]);
  }
  return heap->String(made, text.safe);
}

const Value* ItemAt(const Value& sequence, int64_t index) {
  auto size = static_cast<int64_t>(sequence.list->span.size);
  if (index < 0) index += size;
  return index >= 0 && index < size ? &sequence.list->span[static_cast<size_t>(index)] : nullptr;
}

// The item at an integer, or a missing value.
Value Indexed(Heap* heap, const Value& object, int64_t index) {
  auto size = static_cast<int64_t>(LengthOf(object));
  if (object.is_sequence()) {
    const Value* item = ItemAt(object, index);
    return item ? *item : Value();
  }
  if (index < 0) index += size;
  if (index < 0 || index >= size) return Value();
  if (object.is(Kind::kRange)) return Int(object.range->start + index * object.range->step);
  return CutText(heap, object, {index, 1, 1});
}

}  // namespace

bool IsHashable(const Value& value) {
  if (value.is(Kind::kTuple)) return std::all_of(value.list->span.begin(), value.list->span.end(), IsHashable);
  return !value.is(Kind::kList) && !value.is(Kind::kDict) && !value.is(Kind::kView);
}

int64_t ToIndex(const Value& value) {
  if (value.is(Kind::kUndefined)) FailUndefined(value);
  if (!value.is_integer()) {
    Fail("TypeError", std::string("'") + TypeName(value.kind) + "' object cannot be interpreted as an integer");
  }
  return value.as_integer();
}

Value RangeOf(Heap* heap, int64_t start, int64_t stop, int64_t step) {
  Range* made = heap->New<Range>();
  *made = {start, stop, step, 0};
  bool any = step > 0 ? start < stop : start > stop;
  uint64_t distance = step > 0 ? static_cast<uint64_t>(stop) - static_cast<uint64_t>(start)
                               : static_cast<uint64_t>(start) - static_cast<uint64_t>(stop);
  uint64_t by = step > 0 ? static_cast<uint64_t>(step) : 0 - static_cast<uint64_t>(step);
  made->size = any ? (distance - 1) / by + 1 : 0;
  Value value;
  value.kind = Kind::kRange;
  value.range = made;
  return value;
}

Value Apply(Heap* heap, Operator op, const Value& left, const Value& right) {
  if (left.is_integer() && right.is_integer()) return OfIntegers(op, left.as_integer(), right.as_integer());
  if (left.is_number() && right.is_number()) return OfFloats(op, left.as_number(), right.as_number());
  bool text = left.is(Kind::kString);
  if (op == Operator::kModulo && text) return PercentFormat(heap, left, right);
  if (op == Operator::kAdd && text && right.is(Kind::kString)) return AddTexts(heap, left, right);
  if (op == Operator::kAdd && left.is_sequence() && left.kind == right.kind) return AddSequences(heap, left, right);
  if (op == Operator::kMultiply) {
    if ((text || left.is_sequence()) && right.is_integer()) return Repeat(heap, left, right.as_integer());
    if ((right.is(Kind::kString) || right.is_sequence()) && left.is_integer()) {
      return Repeat(heap, right, left.as_integer());
    }
  }
  NoOperator(op, left, right);
}

Value Negate(const Value& value) {
  if (value.is(Kind::kFloat)) return Float(-value.number);
  if (value.is(Kind::kUndefined)) FailUndefined(value);
  if (!value.is_integer()) Fail("TypeError", std::string("bad operand type for unary -: '") + TypeName(value.kind) + "'");
  return OfIntegers(Operator::kSubtract, 0, value.as_integer());
}

bool Compare(Heap* heap, Comparison op, const Value& left, const Value& right) {
  switch (op) {
    case Comparison::kEqual:
      return Equal(heap, left, right);
    case Comparison::kUnequal:
      return !Equal(heap, left, right);
    case Comparison::kGreater:
      return Less(heap, right, left);
    case Comparison::kGreaterEqual:
      return Less(heap, right, left) || Equal(heap, left, right);
    case Comparison::kLess:
      return Less(heap, left, right);
    case Comparison::kLessEqual:
      return Less(heap, left, right) || Equal(heap, left, right);
    case Comparison::kIn:
      return Contains(heap, right, left);
    default:
      return !Contains(heap, right, left);
  }
}

Value GetAttr(Heap* heap, const Value& object, const Value& name) {
  if (object.is(Kind::kUndefined)) FailUndefined(object);
  Attribute found = AttributeOf(object.kind, name.text());
  if (found == Attribute::kMethod) {
    Method* method = heap->New<Method>();
    *method = {object, name.string};
    Value value;
    value.kind = Kind::kMethod;
    value.method = method;
    return value;
  }
  if (found == Attribute::kNone && (object.is(Kind::kDict) || object.is(Kind::kNamespace))) {
    const Value* item = object.dict->Find(heap, name);
    if (item) return *item;
  }
  return Heap::Undefined(name, object.kind);
}

Value GetItem(Heap* heap, const Value& object, const Value& key) {
  if (object.is(Kind::kUndefined)) FailUndefined(object);
  if (object.is(Kind::kDict) && IsHashable(key)) {
    const Value* item = object.dict->Find(heap, key);
    if (item) return *item;
  }
  bool indexed = object.is_sequence() || object.is(Kind::kString) || object.is(Kind::kRange);
  if (indexed && key.is_integer()) {
    Value item = Indexed(heap, object, key.as_integer());
    if (!item.is(Kind::kMissing)) return item;
  }
  if (object.is(Kind::kLoop)) Stop("an attribute of a loop by its name");
  if (key.is(Kind::kString) && !object.is(Kind::kDict)) return GetAttr(heap, object, key);
  if (key.is(Kind::kString) && AttributeOf(object.kind, key.text()) == Attribute::kMethod) {
    return GetAttr(heap, object, key);
  }
  return Heap::Undefined(key.is(Kind::kString) ? key : heap->String(Repr(heap, key)), object.kind);
}

Value Slice(Heap* heap, const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is(Kind::kUndefined)) FailUndefined(object);
  bool text = object.is(Kind::kString);
  if (!text && !object.is_sequence() && !object.is(Kind::kRange)) {
    Fail("TypeError", std::string("'") + TypeName(object.kind) + "' object is not subscriptable");
  }
  Cut cut = CutOf(static_cast<int64_t>(LengthOf(object)), start, stop, step);
  if (text) return CutText(heap, object, cut);
  if (object.is(Kind::kRange)) {
    const Range& range = *object.range;
    int64_t by = range.step * cut.step, first = range.start + cut.start * range.step;
    return RangeOf(heap, first, first + cut.count * by, by);
  }
  Value* items = heap->New<Value>(static_cast<size_t>(cut.count));
  for (int64_t i = 0; i < cut.count; ++i) items[i] = object.list->span[static_cast<size_t>(cut.start + i * cut.step)];
  return heap->Sequence(object.kind, items, static_cast<size_t>(cut.count));
}

Value Lookup(Heap* heap, const Value& item, const Value& attribute, const Value& otherwise) {
  if (attribute.is(Kind::kNone)) return item;
  auto step = [&](const Value& from, const Value& key) {
    Value found = GetItem(heap, from, key);
    return found.is(Kind::kUndefined) && !otherwise.is(Kind::kNone) ? otherwise : found;
  };
  if (!attribute.is(Kind::kString)) return step(item, attribute);
  std::string_view rest = attribute.text();
  Value value = item;
  for (size_t parts = 0;; ++parts) {
    if (parts == kMaxParts) Stop("an attribute of more than " + std::to_string(kMaxParts) + " parts");
    size_t end = std::min(rest.find('.'), rest.size());
    std::string_view part = rest.substr(0, end);
    bool number = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string_view::npos;
    Value key = number ? Int(std::stol(std::string(part))) : heap->String(part);
    value = step(value, key);
    if (end == rest.size()) return value;
    rest.remove_prefix(end + 1);
  }
}

}  // namespace mlcpipe::chat
