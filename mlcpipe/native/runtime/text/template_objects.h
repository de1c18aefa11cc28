// Objects of a running template other than data: frames of variables, macros, loops.
#ifndef MLCPIPE_RUNTIME_TEXT_TEMPLATE_OBJECTS_H_
#define MLCPIPE_RUNTIME_TEXT_TEMPLATE_OBJECTS_H_

#include <string>

#include "text/value.h"

namespace mlcpipe::chat {

// Variables of one call of the template, a macro or a recursive loop.
struct Frame {
  Value* slots = nullptr;
  uint32_t size = 0;
  Frame* outer = nullptr;
  // Of a recursive loop: what it runs over, and how deep.
  Value items;
  uint32_t recursive = 0;  // its node + 1
  uint32_t depth = 0;
};

struct Macro {
  uint32_t node;
  std::string_view name;
  Frame* frame;  // in which it was written
};

// The items that a loop is still to see; a condition is asked as late as Python does.
struct Iteration {
  Span items;
  const Range* range = nullptr;  // in place of items
  size_t next = 0;
  uint32_t test = 0;  // its node + 1
  Frame* frame = nullptr;  // of the condition
};

// `loop` in a loop: jinja2's LoopContext.
struct Loop {
  Iteration* iteration;
  Frame* frame;  // of a recursive loop, which may be called again
  int64_t index0 = -1, length = -1;
  Value before, current, after, changed;
  bool has_after = false;  // whether `after` was looked at; it may be missing then
};

// As str() writes a macro or a loop.
std::string Describe(Heap* heap, const Value& value);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_TEMPLATE_OBJECTS_H_
