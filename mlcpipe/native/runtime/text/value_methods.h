// Methods of Python's str, dict, list and tuple, as template_sandbox.py allows them.
#ifndef MLCPIPE_RUNTIME_TEXT_VALUE_METHODS_H_
#define MLCPIPE_RUNTIME_TEXT_VALUE_METHODS_H_

#include "text/value_format.h"

namespace mlcpipe::chat {

enum class Attribute { kNone, kMethod, kForbidden };

// What Python and its sandbox say about the attribute `name` of a value.
Attribute AttributeOf(Kind kind, std::string_view name);
Value CallMethod(Heap* heap, const Method& method, const Arguments& arguments);

// Also for filters of the same name. Sides: 1 the left, 2 the right, 3 both; `chars` None for spaces.
Value Strip(Heap* heap, const Value& text, const Value& chars, int sides);
Value Replace(Heap* heap, const Value& text, const Value& old, const Value& with, int64_t count);
Value Join(Heap* heap, std::string_view separator, Span parts);
std::vector<Value> SplitLines(Heap* heap, const Value& text, bool keep_ends);
Value Center(Heap* heap, const Value& text, int64_t width, std::string_view fill, char align);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_VALUE_METHODS_H_
