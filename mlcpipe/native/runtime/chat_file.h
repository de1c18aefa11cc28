// A conversation in a file, as mlcpipe/runtime/chat_file.py describes it.
#ifndef MLCPIPE_RUNTIME_CHAT_FILE_H_
#define MLCPIPE_RUNTIME_CHAT_FILE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bundle/states.h"

namespace mlcpipe {

// The header as it lies in the file. Texts end with zeros where they are shorter.
struct ChatHeader {
  char magic[8] = {'m', 'l', 'c', 'c', 'h', 'a', 't', 1};
  uint32_t version = 2, page_tokens = kPage;
  uint64_t tokens = 0, prompt_tokens = 0, chat_bytes = 0, state_bytes = 0;
  char model[64] = {}, states[64] = {}, kv_dtype[8] = {}, reserved[8] = {};
};
static_assert(sizeof(ChatHeader) == 192, "as written");

struct ChatLimits {
  int64_t vocab_size, context_length, prompt_tokens;  // of the model: the longest prompt
};

// The content of a mapped file, checked.
struct SavedChat {
  std::vector<int32_t> tokens;
  int64_t prompt_tokens;
  std::string_view chat;  // the caller's, not checked
  const uint8_t* states;  // of each state the units that are needed after the tokens

  // Checks all of `file`, which must stay, against the header of an empty file for the model. Throws kUsage.
  SavedChat(std::string_view file, const std::string& where, const ChatHeader& ours, const StateTable& table,
            const ChatLimits& limits);
};

// Units of a state, by number.
struct UnitsOfState {
  const uint8_t* data;
  std::vector<int32_t> numbers;
};

// Writes a file as a whole or not at all; `header` is the model's, with how many of the tokens were a prompt. `units` gives
// those of a state that are needed after the tokens, until its next call. Throws kUsage where `path` has another kind of file
// or cannot be written, kResource where the disk has no room.
void WriteChat(const std::string& path, ChatHeader header, const StateTable& table, const std::vector<int32_t>& tokens,
               std::string_view chat, const std::function<UnitsOfState(size_t)>& units);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_CHAT_FILE_H_
