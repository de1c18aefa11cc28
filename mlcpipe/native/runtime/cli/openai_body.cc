#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <random>

#include "cli/http.h"
#include "cli/openai.h"
#include "text/json.h"
#include "text/value_format.h"

namespace mlcpipe::cli {
namespace {

using chat::Dict;
using chat::Heap;
using chat::Kind;
using chat::Value;

constexpr size_t kMaxStops = 16, kMaxStopChars = 1024, kMaxTools = 512;
constexpr int64_t kDefaultTokens = 16;  // of a completion, as OpenAI
constexpr const char* kRoles[] = {"system", "developer", "user", "assistant", "tool"};
constexpr const char* kKept[] = {"name", "tool_call_id", "reasoning_content", "reasoning", "thinking"};
constexpr const char* kPartTypes[] = {"text", "input_text", "output_text", "refusal"};
constexpr const char* kEfforts[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
constexpr const char* kOwnVariables[] = {"messages", "tools", "add_generation_prompt", "allow_control_tokens"};

template <size_t N>
bool IsOneOf(std::string_view word, const char* const (&words)[N]) {
  return std::find(words, words + N, word) != words + N;
}

ApiError Wrong(const std::string& name, const std::string& expected) {
  return {400, name + ": expected " + expected, "", name};
}

// As pydantic finds it in Python: a field of another type, or none that must be there.
ApiError WrongType(const std::string& name, const std::string& expected) {
  return {400, name + ": expected " + expected, "invalid_body", name};
}

ApiError Unsupported(const std::string& name, const std::string& why = "not supported") {
  return {400, name + ": " + why, "unsupported_parameter", name};
}

// The fields of a JSON object; null is as if it were missing.
class Fields {
 public:
  Fields(Heap* heap, const Value& object, std::string where = "")
      : heap_(heap), dict_(object.dict), where_(std::move(where)) {}

  const Value* Find(const char* name) const {
    const Value* value = dict_->Find(heap_, heap_->String(name));
    return value && !value->is(Kind::kNone) ? value : nullptr;
  }
  const Value* Find(const char* name, Kind kind, const char* expected) const {
    const Value* value = Find(name);
    if (value && !value->is(kind)) throw WrongType(where_ + name, expected);
    return value;
  }
  bool Flag(const char* name) const {
    const Value* value = Find(name, Kind::kBool, "true or false");
    return value && value->truth;
  }
  std::optional<std::string> Text(const char* name) const {
    const Value* value = Find(name, Kind::kString, "a string");
    return value ? std::optional<std::string>(value->text()) : std::nullopt;
  }
  std::optional<int64_t> Integer(const char* name, int64_t low = INT64_MIN) const {
    const Value* value = Find(name, Kind::kInt, "an integer");
    if (value && value->integer < low) throw WrongType(where_ + name, "an integer from " + std::to_string(low));
    return value ? std::optional<int64_t>(value->integer) : std::nullopt;
  }
  void Number(const char* name, double* to) const {
    const Value* value = Find(name);
    if (value) *to = NumberOf(*value, where_ + name);
  }
  static double NumberOf(const Value& value, const std::string& name) {
    const bool is_number = value.is(Kind::kInt) || value.is(Kind::kFloat);
    if (!is_number || !std::isfinite(value.as_number())) throw WrongType(name, "a number");
    return value.as_number();
  }
  void Refuse(const char* name) const {
    if (Find(name)) throw Unsupported(where_ + name);
  }

 private:
  Heap* heap_;
  const Dict* dict_;
  std::string where_;
};

void Set(Heap* heap, Dict* dict, std::string_view name, const Value& value) {
  dict->Set(heap, heap->String(name), value);
}

// Text, or the texts of a list of parts; no content is "".
std::string TextOf(Heap* heap, const Value* content, const std::string& where) {
  if (!content) return "";
  if (content->is(Kind::kString)) return std::string(content->text());
  if (!content->is(Kind::kList)) throw Wrong(where, "a list");
  std::string text;
  for (const Value& part : content->list->span) {
    std::string type = chat::TypeName(part.kind);
    const Value* found = nullptr;
    if (part.is(Kind::kDict)) {
      const Fields fields(heap, part);
      const Value* given = fields.Find("type");
      if (given && given->is(Kind::kString)) type = given->text();
      found = fields.Find("text") ? fields.Find("text") : fields.Find("refusal");
    }
    if (!IsOneOf(type, kPartTypes) || !found || !found->is(Kind::kString)) {
      throw Wrong(where, "text, found '" + type.substr(0, 40) + "'; send text only");
    }
    if (&part != content->list->span.begin()) text += "\n";
    text += found->text();
  }
  return text;
}

// Arguments of a call as an object, where they are JSON of one.
Value ArgumentsOf(Heap* heap, const Value* given) {
  if (!given || !chat::Truth(*given)) return heap->Object(heap->New<Dict>());
  if (!given->is(Kind::kString)) return *given;
  try {
    const Value parsed = chat::ReadJson(heap, given->text(), "arguments");
    return parsed.is(Kind::kDict) ? parsed : *given;
  } catch (const Error&) {
    return *given;
  }
}

Value CallsOf(Heap* heap, const Value& calls, const std::string& where) {
  if (!calls.is(Kind::kList)) throw Wrong(where, "a list");
  std::vector<Value> made;
  for (const Value& call : calls.list->span) {
    const Value* function = call.is(Kind::kDict) ? Fields(heap, call).Find("function") : nullptr;
    const Value* name = function && function->is(Kind::kDict) ? Fields(heap, *function).Find("name") : nullptr;
    if (!name || !name->is(Kind::kString)) throw Wrong(where, "calls of functions with a name");
    const Value* id = Fields(heap, call).Find("id");
    Dict *out = heap->New<Dict>(), *inner = heap->New<Dict>();
    Set(heap, inner, "name", *name);
    Set(heap, inner, "arguments", ArgumentsOf(heap, Fields(heap, *function).Find("arguments")));
    Set(heap, out, "id", id ? chat::ToString(heap, *id) : heap->String(""));
    Set(heap, out, "type", heap->String("function"));
    Set(heap, out, "function", heap->Object(inner));
    made.push_back(heap->Object(out));
  }
  return heap->Copied(Kind::kList, made);
}

Value MessageOf(Heap* heap, const Value& message, const std::string& where, bool* is_system, std::string* content) {
  if (!message.is(Kind::kDict)) throw WrongType(where, "an object");
  const Fields fields(heap, message, where + ".");
  const std::string role = fields.Text("role").value_or("");
  if (!IsOneOf(role, kRoles)) {
    throw Wrong(where + ".role", "one of system, developer, user, assistant, tool");
  }
  *is_system = role == "system" || role == "developer";
  *content = TextOf(heap, fields.Find("content"), where + ".content");
  Dict* out = heap->New<Dict>();
  Set(heap, out, "role", heap->String(*is_system ? "system" : role));
  Set(heap, out, "content", heap->String(*content));
  for (const char* name : kKept) {
    if (const Value* value = fields.Find(name)) Set(heap, out, name, *value);
  }
  const Value* calls = fields.Find("tool_calls");
  if (calls && chat::Truth(*calls)) Set(heap, out, "tool_calls", CallsOf(heap, *calls, where + ".tool_calls"));
  return heap->Object(out);
}

// As templates take them: `developer` is `system`, and two system messages at the beginning are one.
std::string MessagesOf(Heap* heap, const Fields& fields) {
  const Value* given = fields.Find("messages", Kind::kList, "a list");
  if (!given) throw WrongType("messages", "a list");
  if (!given->list->span.size) throw Wrong("messages", "at least one");
  std::vector<Value> out;
  std::string first;
  for (const Value& message : given->list->span) {
    const std::string where = "messages[" + std::to_string(&message - given->list->span.begin()) + "]";
    bool is_system = false;
    std::string content;
    const Value made = MessageOf(heap, message, where, &is_system, &content);
    if (is_system && out.size() == 1 && Fields(heap, out[0]).Text("role") == "system") {
      first += (first.empty() || content.empty() ? "" : "\n\n") + content;
      Set(heap, out[0].dict, "content", heap->String(first));
      continue;
    }
    if (out.empty()) first = content;
    out.push_back(made);
  }
  return chat::WriteJson(heap, heap->Copied(Kind::kList, out), {});
}

Value ToolOf(Heap* heap, const Value& tool, const std::string& where) {
  const Fields outer(heap, tool.is(Kind::kDict) ? tool : heap->Object(heap->New<Dict>()));
  const Value* function = outer.Find("function");
  const Value* type = outer.Find("type");
  const bool is_function = !type || (type->is(Kind::kString) && type->text() == "function");
  if (!is_function || !function || !function->is(Kind::kDict)) throw Wrong(where, "a function");
  const Fields fields(heap, *function, where + ".function.");
  const std::string name = fields.Text("name").value_or("");
  if (name.empty() || chat::CountChars(name) > 256) throw Wrong(where + ".function.name", "a name");
  const Value* parameters = fields.Find("parameters", Kind::kDict, "a JSON schema");
  const Value* description = fields.Find("description");
  Dict *out = heap->New<Dict>(), *inner = heap->New<Dict>(), *any = heap->New<Dict>();
  Set(heap, any, "type", heap->String("object"));
  Set(heap, any, "properties", heap->Object(heap->New<Dict>()));
  Set(heap, inner, "name", heap->String(name));
  Set(heap, inner, "description", description && description->is(Kind::kString) ? *description : heap->String(""));
  Set(heap, inner, "parameters", parameters ? *parameters : heap->Object(any));
  Set(heap, out, "type", heap->String("function"));
  Set(heap, out, "function", heap->Object(inner));
  return heap->Object(out);
}

// The tools for the template, unless the request wants none of them called.
std::vector<Value> ToolsOf(Heap* heap, const Fields& fields) {
  std::vector<Value> tools;
  if (const Value* given = fields.Find("tools", Kind::kList, "a list of tools")) {
    if (given->list->span.size > kMaxTools) throw Wrong("tools", "at most " + std::to_string(kMaxTools));
    for (const Value& tool : given->list->span) {
      tools.push_back(ToolOf(heap, tool, "tools[" + std::to_string(tools.size()) + "]"));
    }
  }
  if (const Value* choice = fields.Find("tool_choice")) {
    const std::string_view word = choice->is(Kind::kString) ? choice->text() : "";
    if (word == "none") return {};
    if (word != "auto" && word != "required" && !choice->is(Kind::kDict)) throw Wrong("tool_choice", "auto or none");
    if (word != "auto") throw Unsupported("tool_choice", "expected auto or none");
  }
  const Value* parallel = fields.Find("parallel_tool_calls", Kind::kBool, "true or false");
  if (parallel && !parallel->truth && !tools.empty()) throw Unsupported("parallel_tool_calls");
  return tools;
}

// Variables of the template as JSON.
void ReadVariables(Heap* heap, const Fields& fields, Body* body) {
  Dict* variables = heap->New<Dict>();
  if (const auto effort = fields.Text("reasoning_effort")) {
    if (!IsOneOf(*effort, kEfforts)) {
      throw Wrong("reasoning_effort", "one of none, minimal, low, medium, high, xhigh, max");
    }
    if (*effort == "none") Set(heap, variables, "enable_thinking", chat::Bool(false));
    else Set(heap, variables, "reasoning_effort", heap->String(*effort));
  }
  if (const Value* given = fields.Find("chat_template_kwargs", Kind::kDict, "an object")) {
    for (uint32_t i = 0; i < given->dict->size; ++i) {
      const Value& key = given->dict->keys[i];
      if (IsOneOf(key.text(), kOwnVariables)) throw Wrong("chat_template_kwargs", "variables of the template");
      variables->Set(heap, key, given->dict->values[i]);
    }
  }
  body->variables = chat::WriteJson(heap, heap->Object(variables), {});
  const std::vector<Value> tools = ToolsOf(heap, fields);
  if (tools.empty()) return;
  body->without_tools = body->variables;
  Set(heap, variables, "tools", heap->Copied(Kind::kList, tools));
  body->variables = chat::WriteJson(heap, heap->Object(variables), {});
}

void AddStop(const Value& text, Body* body) {
  const bool fits = text.is(Kind::kString) && text.string->chars > 0 && text.string->chars <= kMaxStopChars;
  if (!fits || body->stops.size() == kMaxStops) {
    throw Wrong("stop", "at most " + std::to_string(kMaxStops) + " strings, not empty");
  }
  body->stops.emplace_back(text.text());
}

void ReadBiases(const Value& biases, Body* body) {
  for (uint32_t i = 0; i < biases.dict->size; ++i) {
    const std::string_view key = biases.dict->keys[i].text();
    int32_t token = 0;
    const auto [stop, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (key.empty() || stop != key.data() + key.size() || error != std::errc()) {
      throw Wrong("logit_bias", "token ids as keys");
    }
    body->bias_tokens.push_back(token);
    body->biases.push_back(Fields::NumberOf(biases.dict->values[i], "logit_bias"));
  }
}

void ReadSampling(const Fields& fields, Body* body) {
  mlcpipe_sampling* sampling = &body->sampling;
  fields.Number("temperature", &sampling->temperature);
  fields.Number("top_p", &sampling->top_p);
  fields.Number("min_p", &sampling->min_p);
  fields.Number("repetition_penalty", &sampling->repetition_penalty);
  fields.Number("presence_penalty", &sampling->presence_penalty);
  fields.Number("frequency_penalty", &sampling->frequency_penalty);
  if (const auto top_k = fields.Integer("top_k")) sampling->top_k = *top_k == -1 ? 0 : *top_k;
  if (const auto seed = fields.Integer("seed")) {
    sampling->seed = static_cast<uint64_t>(*seed);
  } else {
    std::random_device random;
    sampling->seed = uint64_t{random()} << 32 | random();
  }
  if (const Value* biases = fields.Find("logit_bias", Kind::kDict, "an object")) ReadBiases(*biases, body);
}

// What chat and completions share.
Body ReadShared(Heap* heap, const Fields& fields, const Served& served) {
  Body body;
  body.sampling = served.sampling;
  if (const auto model = fields.Text("model")) CheckModel(*model, served);
  for (const char* name : {"grammar", "regex", "cache_salt", "timeout"}) fields.Refuse(name);
  if (fields.Integer("n", 1).value_or(1) != 1) throw Unsupported("n", "expected 1");
  const Value* format = fields.Find("response_format");
  const Value* type = format && format->is(Kind::kDict) ? Fields(heap, *format).Find("type") : nullptr;
  if (format && !(type && type->is(Kind::kString) && type->text() == "text")) {
    throw Unsupported("response_format", "expected text");
  }
  body.stream = fields.Flag("stream");
  body.ignore_end = fields.Flag("ignore_eos");
  body.deterministic = fields.Flag("deterministic");
  body.max_tokens = fields.Integer("max_tokens", 1).value_or(0);
  if (const Value* stop = fields.Find("stop")) {
    if (stop->is(Kind::kList)) {
      for (const Value& text : stop->list->span) AddStop(text, &body);
    } else {
      AddStop(*stop, &body);
    }
  }
  ReadSampling(fields, &body);
  return body;
}

// Reads a body with `read`, which gets its fields.
template <typename Read>
Body ReadBody(std::string_view json, Read read) {
  const chat::Characters characters;
  Heap heap(characters);
  try {
    const Value object = chat::ReadJson(&heap, json, "the body");
    if (!object.is(Kind::kDict)) throw WrongType("body", "a JSON object");
    return read(&heap, Fields(&heap, object));
  } catch (const Error& error) {
    throw ApiError{400, error.what(), "invalid_body", ""};
  }
}

void ReadStreamOptions(Heap* heap, const Fields& fields, Body* body) {
  const Value* options = fields.Find("stream_options", Kind::kDict, "an object");
  body->include_usage = options && Fields(heap, *options, "stream_options.").Flag("include_usage");
}

}  // namespace

Body ReadChatBody(std::string_view json, const Served& served) {
  return ReadBody(json, [&](Heap* heap, const Fields& fields) {
    Body body = ReadShared(heap, fields, served);
    body.chat = true;
    ReadStreamOptions(heap, fields, &body);
    for (const char* name : {"audio", "functions", "function_call", "web_search_options", "top_logprobs"}) {
      fields.Refuse(name);
    }
    if (fields.Flag("logprobs")) throw Unsupported("logprobs");
    if (const Value* modes = fields.Find("modalities", Kind::kList, "a list")) {
      const chat::Span span = modes->list->span;
      if (span.size != 1 || !span[0].is(Kind::kString) || span[0].text() != "text") {
        throw Unsupported("modalities", "expected text alone");
      }
    }
    body.max_tokens = fields.Integer("max_completion_tokens", 1).value_or(body.max_tokens);
    ReadVariables(heap, fields, &body);
    body.messages = MessagesOf(heap, fields);
    return body;
  });
}

Body ReadCompletionBody(std::string_view json, const Served& served) {
  return ReadBody(json, [&](Heap* heap, const Fields& fields) {
    Body body = ReadShared(heap, fields, served);
    ReadStreamOptions(heap, fields, &body);
    for (const char* name : {"suffix", "logprobs"}) fields.Refuse(name);
    if (fields.Flag("echo")) throw Unsupported("echo");
    if (fields.Integer("best_of").value_or(1) != 1) throw Unsupported("best_of", "expected 1");
    const Value* prompt = fields.Find("prompt");
    if (prompt && prompt->is(Kind::kList) && prompt->list->span.size == 1) prompt = &prompt->list->span[0];
    if (!prompt || !prompt->is(Kind::kString)) throw WrongType("prompt", "one text");
    if (!prompt->string->bytes) throw Wrong("prompt", "at least one token");
    body.text = prompt->text();
    if (!body.max_tokens) body.max_tokens = kDefaultTokens;
    return body;
  });
}

}  // namespace mlcpipe::cli
