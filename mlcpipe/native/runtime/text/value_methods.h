// Methods of Python's str, dict, list and tuple, as template_sandbox.py allows them.
#ifndef MLCPIPE_RUNTIME_TEXT_VALUE_METHODS_H_
#define MLCPIPE_RUNTIME_TEXT_VALUE_METHODS_H_

#include "text/value_format.h"

namespace mlcpipe::chat {

enum class Attribute { kNone, kMethod, kForbidden };

// The attribute `name` of a value in Python and its sandbox.
Attribute AttributeOf(Kind kind, std::string_view name);
Value CallMethod(Heap* heap, const Method& method, const Arguments& arguments);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_VALUE_METHODS_H_
