// The messages of a chat as JSON: for the template, and in a saved chat.
#ifndef MLCPIPE_RUNTIME_CLI_CHAT_JSON_H_
#define MLCPIPE_RUNTIME_CLI_CHAT_JSON_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mlcpipe::cli {

struct Message {
  std::string role, content;
};

std::string JsonOf(const std::vector<Message>& messages);

// The messages of a saved chat, in addition to its tokens (mlcpipe/cli/chat/transcript.py).
std::string SavedJson(const std::vector<Message>& messages);

// Its messages; none where it has no list of them, with a role and a content each.
std::optional<std::vector<Message>> SavedMessages(std::string_view json);

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_CHAT_JSON_H_
