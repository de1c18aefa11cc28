#include <vector>

#include "cli/openai_fields.h"

namespace mlcpipe::cli {

using chat::Dict;
using chat::Heap;
using chat::Kind;
using chat::Value;

namespace {

constexpr size_t kMaxItems = 4096;  // messages, parts of one, calls
constexpr const char* kRoles[] = {"system", "developer", "user", "assistant", "tool"};
constexpr const char* kKept[] = {"name", "tool_call_id", "reasoning_content", "reasoning", "thinking"};
constexpr const char* kPartTypes[] = {"text", "input_text", "output_text", "refusal"};

ApiError WrongList(const std::string& where) { return Wrong(where, "a list of at most " + std::to_string(kMaxItems)); }

// Text, or the texts of a list of parts; no content is "".
std::string TextOf(Heap* heap, const Value* content, const std::string& where) {
  if (!content) return "";
  if (content->is(Kind::kString)) return std::string(content->text());
  if (!content->is(Kind::kList) || content->list->span.size > kMaxItems) throw WrongList(where);
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
  if (!calls.is(Kind::kList) || calls.list->span.size > kMaxItems) throw WrongList(where);
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

}  // namespace

std::string MessagesOf(Heap* heap, const Fields& fields) {
  const Value* given = fields.Find("messages", Kind::kList, "a list");
  if (!given) throw WrongType("messages", "a list");
  if (!given->list->span.size) throw Wrong("messages", "at least one");
  if (given->list->span.size > kMaxItems) throw Wrong("messages", "at most " + std::to_string(kMaxItems));
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

}  // namespace mlcpipe::cli
