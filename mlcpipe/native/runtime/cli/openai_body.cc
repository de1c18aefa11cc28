#include <charconv>
#include <random>

#include "cli/openai.h"
#include "cli/openai_fields.h"

namespace mlcpipe::cli {
namespace {

using chat::Dict;
using chat::Heap;
using chat::Kind;
using chat::Value;

constexpr int64_t kMaxPriority = 1000;
constexpr double kMaxTimeoutS = 1e9;
constexpr size_t kMaxStops = 128, kMaxStopChars = 1024, kMaxTools = 512;
constexpr double kLeastTopP = 1e-300;  // leaves the most probable token, as 0 is meant
constexpr int64_t kDefaultTokens = 16;  // of a completion, as OpenAI
constexpr const char* kEfforts[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
constexpr const char* kOwnVariables[] = {"messages", "tools", "add_generation_prompt", "continue_final_message",
                                         "allow_control_tokens"};
// Fields of other servers that this one does not have: constraints of answers, and numbers with the value that changes nothing.
constexpr const char* kConstraints[] = {
    "grammar", "regex", "ebnf", "json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "allowed_token_ids", "stop_token_ids", "chat_template", "cache_salt",
    "prompt_logprobs", "thinking", "reasoning"};
constexpr std::pair<const char*, double> kNeutral[] = {
    {"min_tokens", 0}, {"typical_p", 1}, {"mirostat", 0}, {"xtc_probability", 0}, {"dry_multiplier", 0},
    {"dynatemp_range", 0}, {"top_n_sigma", -1}, {"n_predict", -1},
    {"thinking_budget", -1}, {"thinking_budget_tokens", -1}, {"thinking_token_budget", -1}, {"reasoning_budget", -1}};

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
  const bool fits = text.is(Kind::kString) && text.string->chars <= kMaxStopChars;
  if (!fits || body->stops.size() == kMaxStops) {
    throw Wrong("stop", "at most " + std::to_string(kMaxStops) + " strings");
  }
  if (text.string->chars) body->stops.emplace_back(text.text());
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

// Tokens of an answer; 0 for -1, which sets no bound.
std::optional<int64_t> MaxTokens(const Fields& fields, const char* name) {
  const auto found = fields.Integer(name, -1);
  if (found == 0) throw Unsupported(name, "expected 1 or more, or -1");
  return found == -1 ? 0 : found;
}

void ReadSampling(const Fields& fields, Body* body) {
  mlcpipe_sampling* sampling = &body->sampling;
  fields.Number("temperature", &sampling->temperature);
  fields.Number("top_p", &sampling->top_p);
  if (sampling->top_p == 0) sampling->top_p = kLeastTopP;
  fields.Number("min_p", &sampling->min_p);
  fields.Number("repeat_penalty", &sampling->repetition_penalty);
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

// The class of a request, and when its answer is not needed any more. Clients say a lower number for what is more urgent.
void ReadUrgency(const Fields& fields, Body* body) {
  if (const auto priority = fields.Integer("priority")) {
    if (*priority < -kMaxPriority || *priority > kMaxPriority) throw Wrong("priority", "from -1000 to 1000");
    body->priority = (*priority < 0) - (*priority > 0);
  } else if (const auto tier = fields.Text("service_tier")) {
    body->priority = (*tier == "priority") - (*tier == "flex");
  }
  fields.Number("timeout", &body->timeout_s);
  if (fields.Find("timeout") && body->timeout_s <= 0) throw WrongType("timeout", "more than 0");
  body->timeout_s = std::min(body->timeout_s, kMaxTimeoutS);
}

// The fields that chat and completions share.
Body ReadShared(Heap* heap, const Fields& fields, const Served& served) {
  Body body;
  body.sampling = served.sampling;
  if (const auto model = fields.Text("model")) CheckModel(*model, served);
  for (const char* name : kConstraints) fields.Refuse(name);
  for (const auto& [name, neutral] : kNeutral) {
    double value = neutral;
    fields.Number(name, &value);
    if (value != neutral) throw Unsupported(name);
  }
  if (fields.Integer("n", 1).value_or(1) != 1) throw Unsupported("n", "expected 1");
  const Value* format = fields.Find("response_format");
  const Value* type = format && format->is(Kind::kDict) ? Fields(heap, *format).Find("type") : nullptr;
  if (format && !(type && type->is(Kind::kString) && type->text() == "text")) {
    throw Unsupported("response_format", "expected text");
  }
  body.stream = fields.Flag("stream");
  body.ignore_end = fields.Flag("ignore_eos");
  body.deterministic = fields.Flag("deterministic");
  body.max_tokens = MaxTokens(fields, "max_tokens").value_or(0);
  if (const Value* stop = fields.Find("stop")) {
    if (stop->is(Kind::kList)) {
      for (const Value& text : stop->list->span) AddStop(text, &body);
    } else {
      AddStop(*stop, &body);
    }
  }
  ReadSampling(fields, &body);
  ReadUrgency(fields, &body);
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
    if (fields.Flag("continue_final_message")) throw Unsupported("continue_final_message");
    if (fields.Find("add_generation_prompt") && !fields.Flag("add_generation_prompt")) {
      throw Unsupported("add_generation_prompt", "expected true");
    }
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
    body.max_tokens = MaxTokens(fields, "max_completion_tokens").value_or(body.max_tokens);
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
