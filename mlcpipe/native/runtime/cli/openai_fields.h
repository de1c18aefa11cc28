// Fields of a request's JSON, with the refusals that name them.
#ifndef MLCPIPE_RUNTIME_CLI_OPENAI_FIELDS_H_
#define MLCPIPE_RUNTIME_CLI_OPENAI_FIELDS_H_

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "cli/http.h"
#include "text/json.h"
#include "text/value_format.h"

namespace mlcpipe::cli {

template <size_t N>
bool IsOneOf(std::string_view word, const char* const (&words)[N]) {
  return std::find(words, words + N, word) != words + N;
}

inline ApiError Wrong(const std::string& name, const std::string& expected) {
  return {400, name + ": expected " + expected, "", name};
}

// As pydantic finds it in Python: a field of another type, or none that must be there.
inline ApiError WrongType(const std::string& name, const std::string& expected) {
  return {400, name + ": expected " + expected, "invalid_body", name};
}

inline ApiError Unsupported(const std::string& name, const std::string& why = "not supported") {
  return {400, name + ": " + why, "unsupported_parameter", name};
}

// The fields of a JSON object; null is as if it were missing.
class Fields {
 public:
  Fields(chat::Heap* heap, const chat::Value& object, std::string where = "")
      : heap_(heap), dict_(object.dict), where_(std::move(where)) {}

  const chat::Value* Find(const char* name) const {
    const chat::Value* value = dict_->Find(heap_, heap_->String(name));
    return value && !value->is(chat::Kind::kNone) ? value : nullptr;
  }
  const chat::Value* Find(const char* name, chat::Kind kind, const char* expected) const {
    const chat::Value* value = Find(name);
    if (value && !value->is(kind)) throw WrongType(where_ + name, expected);
    return value;
  }
  bool Flag(const char* name) const {
    const chat::Value* value = Find(name, chat::Kind::kBool, "true or false");
    return value && value->truth;
  }
  std::optional<std::string> Text(const char* name) const {
    const chat::Value* value = Find(name, chat::Kind::kString, "a string");
    return value ? std::optional<std::string>(value->text()) : std::nullopt;
  }
  std::optional<int64_t> Integer(const char* name, int64_t low = INT64_MIN) const {
    const chat::Value* value = Find(name, chat::Kind::kInt, "an integer");
    if (value && value->integer < low) throw WrongType(where_ + name, "an integer from " + std::to_string(low));
    return value ? std::optional<int64_t>(value->integer) : std::nullopt;
  }
  void Number(const char* name, double* to) const {
    const chat::Value* value = Find(name);
    if (value) *to = NumberOf(*value, where_ + name);
  }
  static double NumberOf(const chat::Value& value, const std::string& name) {
    const bool is_number = value.is(chat::Kind::kInt) || value.is(chat::Kind::kFloat);
    if (!is_number || !std::isfinite(value.as_number())) throw WrongType(name, "a number");
    return value.as_number();
  }
  void Refuse(const char* name) const {
    if (Find(name)) throw Unsupported(where_ + name);
  }

 private:
  chat::Heap* heap_;
  const chat::Dict* dict_;
  std::string where_;
};

inline void Set(chat::Heap* heap, chat::Dict* dict, std::string_view name, const chat::Value& value) {
  dict->Set(heap, heap->String(name), value);
}

// Messages as templates take them, as JSON: `developer` is `system`, and two system messages at the beginning are one.
std::string MessagesOf(chat::Heap* heap, const Fields& fields);

// A tool as templates take it.
chat::Value ToolOf(chat::Heap* heap, const chat::Value& tool, const std::string& where);

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_OPENAI_FIELDS_H_
