#include "cli/chat_json.h"

#include "cli/json_text.h"
#include "text/json.h"

namespace mlcpipe::cli {

std::string JsonOf(const std::vector<Message>& messages) {
  std::string json = "[";
  for (const Message& message : messages) {
    if (json.size() > 1) json += ", ";
    json += "{\"role\": " + JsonText(message.role) + ", \"content\": " + JsonText(message.content) + "}";
  }
  return json + "]";
}

std::string SavedJson(const std::vector<Message>& messages) {
  return "{\"format\": \"mlcpipe-chat\", \"version\": 1, \"messages\": " + JsonOf(messages) + "}";
}

std::optional<std::vector<Message>> SavedMessages(std::string_view json) {
  const chat::Characters none{};
  chat::Heap heap(none);
  const auto text = [&](const chat::Value& object, const char* key) {
    const chat::Value* found = object.is(chat::Kind::kDict) ? object.dict->Find(&heap, heap.String(key)) : nullptr;
    return found && found->is(chat::Kind::kString) ? found->string : nullptr;
  };
  try {
    const chat::Value saved = ReadJson(&heap, json, "the chat");
    if (!saved.is(chat::Kind::kDict)) return std::nullopt;
    const chat::Value* list = saved.dict->Find(&heap, heap.String("messages"));
    if (!list || !list->is(chat::Kind::kList)) return std::nullopt;
    std::vector<Message> messages;
    for (const chat::Value& message : list->list->span) {
      const chat::Str *role = text(message, "role"), *content = text(message, "content");
      if (!role || !content) return std::nullopt;
      messages.push_back({std::string(role->view()), std::string(content->view())});
    }
    return messages;
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace mlcpipe::cli
