// Values as text: Python's str, repr, `%` and str.format.
#ifndef MLCPIPE_RUNTIME_TEXT_VALUE_FORMAT_H_
#define MLCPIPE_RUNTIME_TEXT_VALUE_FORMAT_H_

#include <string>

#include "text/value.h"

namespace mlcpipe::chat {

// Positional arguments, and named ones in order.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;

  const Value* Named(std::string_view name) const;
};

// Python's str(value), as a string that is not `safe`.
Value ToString(Heap* heap, const Value& value);
std::string Repr(Heap* heap, const Value& value);
// The shortest digits that give the same number.
std::string FloatText(double number);
// A finite number as printf writes it in the C locale; `form` is e, f or g.
std::string Printed(double number, char form, int precision);
// A number as Python's float() reads it; false for anything else. `text` has no spaces around it.
bool ParseFloat(std::string_view text, double* number);
// As HTML: `&`, `<`, `>`, `'` and `"` are written out.
Value Escape(Heap* heap, const Value& value);
// format % argument
Value PercentFormat(Heap* heap, const Value& format, const Value& argument);
// format.format(...); a field names an argument, without attributes.
Value BraceFormat(Heap* heap, const Value& format, const Arguments& arguments);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_VALUE_FORMAT_H_
