#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <random>

#include "cli/http.h"
#include "cli/json_text.h"
#include "cli/openai.h"

namespace mlcpipe::cli {
namespace {

std::string NewId(const char* prefix) {
  std::random_device random;
  char digits[25];
  std::snprintf(digits, sizeof digits, "%08x%08x%08x", random(), random(), random());
  return prefix + std::string(digits);
}

std::string UsageJson(const UsageCounts& usage) {
  const auto number = [](int64_t count) { return std::to_string(count); };
  std::string own;
  if (usage.miss) {
    own = ",\"cache_miss\":{\"reason\":" + JsonText(usage.miss);
    own += (usage.miss_token < 0 ? "" : ",\"token\":" + number(usage.miss_token)) + "}";
  }
  return "{\"prompt_tokens\":" + number(usage.prompt) + ",\"completion_tokens\":" + number(usage.completion) +
         ",\"total_tokens\":" + number(usage.prompt + usage.completion) +
         ",\"prompt_tokens_details\":{\"cached_tokens\":" + number(usage.cached) +
         "},\"completion_tokens_details\":{\"reasoning_tokens\":" + number(usage.reasoning) + "}" + own + "}";
}

const char* FinishJson(bool stopped) { return stopped ? "\"stop\"" : "\"length\""; }

}  // namespace

void CheckModel(const std::string& name, const Served& served) {
  std::string names;
  for (const std::string& one : served.names) {
    if (one == name || one == "*") return;
    names += (names.empty() ? "" : ", ") + one;
  }
  throw ApiError{404, "the model '" + name.substr(0, 100) + "' is not served here; expected " + names,
                 "model_not_found", "model"};
}

AnswerJson::AnswerJson(const Body& body, const Served& served) : chat_(body.chat) {
  const std::string object = chat_ ? "chat.completion" : "text_completion";
  frame_ = "{\"id\":" + JsonText(NewId(chat_ ? "chatcmpl-" : "cmpl-")) +
           ",\"created\":" + std::to_string(std::time(nullptr)) + ",\"model\":" + JsonText(served.names[0]) +
           ",\"object\":\"" + object;
  chunk_ = frame_ + (chat_ ? ".chunk\"" : "\"") + (body.include_usage ? ",\"usage\":null" : "");
  frame_ += "\"";
}

std::string AnswerJson::Whole(const Delta& answer, bool stopped, const UsageCounts& usage) const {
  std::string choice = "\"text\":" + JsonText(answer.text);
  if (chat_) {
    choice = "\"message\":{\"role\":\"assistant\",\"content\":" + JsonText(answer.text) + ",\"refusal\":null";
    if (!answer.reasoning.empty()) choice += ",\"reasoning_content\":" + JsonText(answer.reasoning);
    choice += "}";
  }
  return frame_ + ",\"choices\":[{\"index\":0," + choice + ",\"logprobs\":null,\"finish_reason\":" +
         FinishJson(stopped) + "}],\"usage\":" + UsageJson(usage) + (chat_ ? ",\"system_fingerprint\":null}" : "}");
}

std::string AnswerJson::Chunk(const std::string& choice) const {
  return chunk_ + ",\"choices\":[{\"index\":0," + choice + "}]}";
}

std::string AnswerJson::DeltaChunk(const std::string& delta, const char* finish) const {
  return Chunk("\"delta\":{" + delta + "},\"logprobs\":null,\"finish_reason\":" + finish);
}

std::string AnswerJson::Begin() const {
  return chat_ ? DeltaChunk("\"role\":\"assistant\",\"content\":\"\"", "null") : "";
}

std::string AnswerJson::Piece(const Delta& delta) const {
  if (!chat_) return Chunk("\"text\":" + JsonText(delta.text) + ",\"logprobs\":null,\"finish_reason\":null");
  std::string members = delta.text.empty() ? "" : "\"content\":" + JsonText(delta.text);
  if (!delta.reasoning.empty()) {
    members += std::string(members.empty() ? "" : ",") + "\"reasoning_content\":" + JsonText(delta.reasoning);
  }
  return DeltaChunk(members, "null");
}

std::string AnswerJson::End(bool stopped) const {
  if (chat_) return DeltaChunk("", FinishJson(stopped));
  return Chunk(std::string("\"text\":\"\",\"logprobs\":null,\"finish_reason\":") + FinishJson(stopped));
}

std::string AnswerJson::UsageAlone(const UsageCounts& usage) const {
  // In place of null, with which `chunk_` ends.
  return chunk_.substr(0, chunk_.size() - 4) + UsageJson(usage) + ",\"choices\":[]}";
}

std::string ModelJson(const std::string& name, const Served& served) {
  const std::string length = std::to_string(served.context_length);
  return "{\"id\":" + JsonText(name) + ",\"object\":\"model\",\"type\":\"model\",\"display_name\":" + JsonText(name) +
         ",\"created\":" + std::to_string(served.created) + ",\"owned_by\":\"mlcpipe\",\"root\":" +
         JsonText(served.names[0]) + ",\"parent\":null,\"max_model_len\":" + length + ",\"meta\":{\"context_length\":" + length +
         ",\"vocab_size\":" + std::to_string(served.vocab_size) + served.facts + "}}";
}

std::string ModelsJson(const Served& served) {
  std::string models, last;
  for (const std::string& name : served.names) {
    if (name == "*") continue;
    models += (models.empty() ? "" : ",") + ModelJson(name, served);
    last = name;
  }
  return "{\"object\":\"list\",\"data\":[" + models + "],\"has_more\":false,\"first_id\":" + JsonText(served.names[0]) +
         ",\"last_id\":" + JsonText(last) + "}";
}

}  // namespace mlcpipe::cli
