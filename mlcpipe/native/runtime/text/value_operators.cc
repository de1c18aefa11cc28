#include <algorithm>
#include <cmath>

#include "text/value_access.h"
#include "text/value_format.h"

namespace mlcpipe::chat {

namespace {

constexpr int64_t kExactInteger = int64_t{1} << 53;

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

}  // namespace

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
  if (!value.is_integer()) {
    Fail("TypeError", std::string("bad operand type for unary -: '") + TypeName(value.kind) + "'");
  }
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

}  // namespace mlcpipe::chat
