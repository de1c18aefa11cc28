#include "text/template.h"

#include "text/harmony.h"
#include "text/json.h"
#include "text/template_eval.h"

namespace mlcpipe::chat {

namespace {

// Templates read a message's reasoning under one of these names.
constexpr std::string_view kReasoning[] = {"reasoning_content", "thinking", "reasoning"};

const Value* Member(Heap* heap, const Value& object, std::string_view name) {
  return object.dict->Find(heap, heap->String(name));
}

Error Wrong(std::string where, std::string expected, std::string found) {
  return Error(Code::kUsage, std::move(where)).Expected(std::move(expected)).Found(std::move(found));
}

void CheckContent(Heap* heap, const Value* content, const std::string& where) {
  if (!content || content->is(Kind::kNone) || content->is(Kind::kString)) return;
  if (!content->is(Kind::kList)) throw Wrong(where, "text, or a list of text parts", TypeName(content->kind));
  Span parts = content->list->span;
  for (size_t i = 0; i < parts.size; ++i) {
    bool is_object = parts[i].is(Kind::kDict);
    const Value* type = is_object ? Member(heap, parts[i], "type") : nullptr;
    const Value* text = is_object ? Member(heap, parts[i], "text") : nullptr;
    bool has_type = type && type->is(Kind::kString);
    if (has_type && type->text() == "text" && text && text->is(Kind::kString)) continue;
    std::string found = has_type ? std::string(type->text()) : is_object ? "None" : TypeName(parts[i].kind);
    throw Wrong(where + "[" + std::to_string(i) + "]", "{\"type\": \"text\", \"text\": …}", found).Next("send text only");
  }
}

void CheckMessages(Heap* heap, const Value& messages) {
  if (!messages.is(Kind::kList)) throw Wrong("messages", "a list of objects", TypeName(messages.kind));
  Span span = messages.list->span;
  if (span.size == 0) throw Wrong("messages", "at least one", "none");
  for (size_t i = 0; i < span.size; ++i) {
    std::string where = "messages[" + std::to_string(i) + "]";
    if (!span[i].is(Kind::kDict)) throw Wrong(where, "an object with role and content", TypeName(span[i].kind));
    const Value* role = Member(heap, span[i], "role");
    if (!role || !role->is(Kind::kString) || role->string->bytes == 0) {
      throw Wrong(where + ".role", "system, user, assistant or tool", role ? Repr(heap, *role) : "None");
    }
    CheckContent(heap, Member(heap, span[i], "content"), where + ".content");
  }
}

// Without members that are null, and without a list of no calls: templates look whether a message has a key.
Value WithoutNothing(Heap* heap, const Value& message) {
  Dict* dict = heap->New<Dict>();
  for (uint32_t i = 0; i < message.dict->size; ++i) {
    const Value &key = message.dict->keys[i], &value = message.dict->values[i];
    const bool empty = value.is(Kind::kList) && value.list->span.size == 0;
    if (!value.is(Kind::kNone) && !(empty && key.text() == "tool_calls")) dict->Set(heap, key, value);
  }
  return heap->Object(dict);
}

// With its reasoning under the names `thinking` and `reasoning_content`, as transformers offers it.
Value WithReasoning(Heap* heap, const Value& message) {
  const Value* reasoning = nullptr;
  for (std::string_view name : kReasoning) {
    const Value* found = reasoning ? nullptr : Member(heap, message, name);
    if (found && !found->is(Kind::kNone)) reasoning = found;
  }
  if (!reasoning) return message;
  Dict* dict = heap->New<Dict>();
  dict->Set(heap, heap->String("thinking"), *reasoning);
  for (uint32_t i = 0; i < message.dict->size; ++i) dict->Set(heap, message.dict->keys[i], message.dict->values[i]);
  dict->Set(heap, heap->String("reasoning_content"), *reasoning);
  return heap->Object(dict);
}

// Without the thoughts that an answer in the harmony format was shown with.
Value WithoutThoughts(Heap* heap, const Value& message) {
  const Value* content = Member(heap, message, "content");
  if (Member(heap, message, "role")->text() != "assistant" || !content || !content->is(Kind::kString)) return message;
  Dict* dict = heap->New<Dict>();
  for (uint32_t i = 0; i < message.dict->size; ++i) dict->Set(heap, message.dict->keys[i], message.dict->values[i]);
  dict->Set(heap, heap->String("content"), heap->String(harmony::WithoutThoughts(content->text())));
  return heap->Object(dict);
}

bool Mentions(const Program& program, std::string_view mark) {
  for (uint32_t i = 0; i < program.strings(); ++i) {
    if (program.string(i).find(mark) != std::string_view::npos) return true;
  }
  return false;
}

// The messages and extras of a request, as one object.
Value Given(Heap* heap, const Request& request, bool harmony) {
  Dict* given = heap->New<Dict>();
  if (!request.extras.empty()) {
    Value extras = ReadJson(heap, request.extras, "extras");
    if (!extras.is(Kind::kDict)) throw Wrong("extras", "an object", TypeName(extras.kind));
    given = extras.dict;
  }
  Value messages = ReadJson(heap, request.messages, "messages");
  CheckMessages(heap, messages);
  std::vector<Value> made;
  for (const Value& message : messages.list->span) {
    const Value said = WithoutNothing(heap, message);
    made.push_back(WithReasoning(heap, harmony ? WithoutThoughts(heap, said) : said));
  }
  given->Set(heap, heap->String("messages"), heap->Copied(Kind::kList, made));
  return heap->Object(given);
}

}  // namespace

Template::Template(const void* data, size_t bytes)
    : program_(data, bytes),
      marks_(program_),
      harmony_(Mentions(program_, harmony::kStart) && Mentions(program_, harmony::kChannel) &&
               Mentions(program_, harmony::kMessage)) {}

std::string Template::Run(Heap* heap, const Request& request, bool mark) const {
  Value given = Given(heap, request, harmony_);
  if (mark) given = marks_.Mark(heap, given);
  Dict* variables = heap->New<Dict>();
  variables->Set(heap, heap->String("tools"), None());
  variables->Set(heap, heap->String("documents"), None());
  for (const SpecialToken& token : program_.special()) {
    variables->Set(heap, heap->String(program_.string(token.name)), heap->String(program_.string(token.text)));
  }
  for (const auto& [name, text] : request.tokens) {
    if (utf8::ValidPrefix(name) != name.size() || utf8::ValidPrefix(text) != text.size()) {
      throw Wrong("a special token", "UTF-8", "other bytes");
    }
    variables->Set(heap, heap->String(name), heap->String(text));
  }
  for (uint32_t i = 0; i < given.dict->size; ++i) variables->Set(heap, given.dict->keys[i], given.dict->values[i]);
  variables->Set(heap, heap->String("add_generation_prompt"), Bool(request.add_generation_prompt));
  heap->Allow(WeightOf(heap->Object(variables)));
  return Evaluator(program_, heap, *variables, request.now).Render();
}

std::string Template::Render(const Request& request) const {
  Heap heap(program_.characters());
  return Run(&heap, request, false);
}

std::vector<Part> Template::RenderMarked(const Request& request) const {
  Heap heap(program_.characters());
  std::string text = Run(&heap, request, true);
  return Marks::Parts(heap, text);
}

}  // namespace mlcpipe::chat
