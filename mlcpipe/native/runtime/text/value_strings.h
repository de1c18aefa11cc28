// Operations of methods and filters on texts, as Python's str does them.
#ifndef MLCPIPE_RUNTIME_TEXT_VALUE_STRINGS_H_
#define MLCPIPE_RUNTIME_TEXT_VALUE_STRINGS_H_

#include <vector>

#include "text/value.h"

namespace mlcpipe::chat {

// Positional arguments of a method, whose number was checked.
using Args = std::vector<Value>;

// The text of an argument that must be one. Raises TypeError.
std::string_view TextOf(const Value& value);
// Argument `index` as an integer, or -1 where it was not given.
int64_t CountOf(const Args& args, size_t index);

Value FindIn(Heap* heap, const Value& self, const Args& args, bool last);
Value IndexIn(Heap* heap, const Value& self, const Args& args, bool last);
Value CountIn(Heap* heap, const Value& self, const Args& args);
Value Begins(Heap* heap, const Value& self, const Args& args, bool at_end);
Value Split(Heap* heap, const Value& self, const Args& args, bool from_right);
Value Partition(Heap* heap, const Value& self, const Args& args, bool last);
Value Zeros(Heap* heap, const Value& self, const Args& args);
Value Without(Heap* heap, const Value& self, const Args& args, bool at_end);

// Sides: 1 the left, 2 the right, 3 both; `chars` None for spaces.
Value Strip(Heap* heap, const Value& text, const Value& chars, int sides);
Value Replace(Heap* heap, const Value& text, const Value& old, const Value& with, int64_t count);
Value Join(Heap* heap, std::string_view separator, Span parts);
std::vector<Value> SplitLines(Heap* heap, const Value& text, bool keep_ends);
// `align` is '<', '^' or '>'.
Value Center(Heap* heap, const Value& text, int64_t width, std::string_view fill, char align);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_VALUE_STRINGS_H_
