// JSON in and out, for the values of a chat template.
#ifndef MLCPIPE_RUNTIME_TEXT_JSON_H_
#define MLCPIPE_RUNTIME_TEXT_JSON_H_

#include <string>
#include <string_view>

#include "text/value.h"

namespace mlcpipe::chat {

// Reads strict JSON: UTF-8, no NaN, integers of 64 bits, at most Limits::kDepth deep; keys keep their order, the last
// of equal ones counts. Throws Error with Code::kUsage, which says where `name` is wrong.
Value ReadJson(Heap* heap, std::string_view text, std::string_view name);

struct JsonStyle {
  bool ascii = false, sort_keys = false, lines = false;
  std::string indent, item = ", ", key = ": ";
};

// As json.dumps with ensure_ascii=False; `ascii` then escapes all but the signs that stand for a message's own.
std::string WriteJson(Heap* heap, const Value& value, const JsonStyle& style);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_JSON_H_
