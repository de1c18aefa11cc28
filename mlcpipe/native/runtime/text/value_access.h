// Python's operators, attributes and items, as jinja2's sandbox allows them.
#ifndef MLCPIPE_RUNTIME_TEXT_VALUE_ACCESS_H_
#define MLCPIPE_RUNTIME_TEXT_VALUE_ACCESS_H_

#include "text/value.h"

namespace mlcpipe::chat {

enum class Operator : uint32_t { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
enum class Comparison : uint32_t { kEqual, kUnequal, kGreater, kGreaterEqual, kLess, kLessEqual, kIn, kNotIn };

Value Apply(Heap* heap, Operator op, const Value& left, const Value& right);
Value Negate(const Value& value);
bool Compare(Heap* heap, Comparison op, const Value& left, const Value& right);

// Of anything but a loop, whose attributes may run its condition.
Value GetAttr(Heap* heap, const Value& object, const Value& name);
Value GetItem(Heap* heap, const Value& object, const Value& key);
// object[start:stop:step]; parts that are not given are None.
Value Slice(Heap* heap, const Value& object, const Value& start, const Value& stop, const Value& step);
// An attribute as filters take it: 'a.0.b' or a number; None is the item itself. `otherwise`, unless None, stands for
// what is undefined.
Value Lookup(Heap* heap, const Value& item, const Value& attribute, const Value& otherwise = None());
// Whether a value can be a key. A tuple is taken to be one if its parts are.
bool IsHashable(const Value& value);
// The argument of a function as an integer. Raises TypeError.
int64_t ToIndex(const Value& value);
Value RangeOf(Heap* heap, int64_t start, int64_t stop, int64_t step);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_VALUE_ACCESS_H_
