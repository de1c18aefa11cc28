#include "chat_file.h"

#include <sys/stat.h>

#include <cstddef>
#include <cstring>

#include "atomic_file.h"
#include "bundle/files.h"

namespace mlcpipe {
namespace {

constexpr uint64_t kStatesAlignment = 64, kDigestBytes = 64, kMaxChatBytes = 16 << 20;

Error Damaged(const std::string& where, std::string expected, std::string found) {
  return Error(Code::kUsage, "the saved chat is damaged")
      .Where(where)
      .Expected(std::move(expected))
      .Found(std::move(found))
      .Next("save the chat again");
}

// Where the states begin; of sizes that are no larger than a file's.
uint64_t StatesBegin(const ChatHeader& header) {
  const uint64_t end = sizeof header + 4 * header.tokens + header.chat_bytes;
  return (end + kStatesAlignment - 1) / kStatesAlignment * kStatesAlignment;
}

ChatHeader ReadHeader(std::string_view file, const std::string& where) {
  ChatHeader header;
  const size_t least = offsetof(ChatHeader, page_tokens);  // what every version has
  if (file.size() >= least && std::memcmp(file.data(), header.magic, sizeof header.magic) == 0) {
    uint32_t version;
    std::memcpy(&version, file.data() + sizeof header.magic, sizeof version);
    if (version != header.version) {
      throw Error(Code::kUsage, "a saved chat of another version of mlcpipe")
          .Where(where)
          .Expected("version " + std::to_string(header.version))
          .Found(std::to_string(version));
    }
    if (file.size() >= sizeof header + kDigestBytes) {
      std::memcpy(&header, file.data(), sizeof header);
      return header;
    }
  }
  throw Error(Code::kUsage, "not a saved chat").Where(where).Expected("a file that /save or mlcpipe_save wrote");
}

// Length of the whole file.
void CheckLength(const ChatHeader& header, std::string_view file, const std::string& where) {
  if (header.page_tokens == kPage && header.tokens <= file.size() && header.chat_bytes <= kMaxChatBytes) {
    const uint64_t begin = StatesBegin(header) + kDigestBytes;
    if (begin <= file.size() && header.state_bytes == file.size() - begin) return;
  }
  throw Damaged(where, "the length that its header states", std::to_string(file.size()) + " bytes");
}

void CheckHash(std::string_view file, const std::string& where) {
  const std::string_view digest = file.substr(file.size() - kDigestBytes);
  if (Sha256(file.substr(0, file.size() - kDigestBytes)) != digest) {
    throw Damaged(where, "the content that was written", "other bytes");
  }
}

// The model, and how it keeps its states.
void CheckModel(const ChatHeader& header, const ChatHeader& ours, const std::string& where) {
  if (std::memcmp(header.model, ours.model, sizeof ours.model) != 0) {
    throw Error(Code::kUsage, "the chat was saved with another model")
        .Where(where)
        .Expected("the checkpoint and quantization of this one")
        .Next("load it with the model that it was saved with");
  }
  const auto check = [&](const char* what, std::string_view expected, std::string_view found) {
    if (expected == found) return;
    const auto text = [](std::string_view name) {
      std::string line(name.substr(0, name.find_last_not_of('\0') + 1));
      for (char& c : line) c = c < 32 || c > 126 ? '?' : c;
      return line;
    };
    throw Error(Code::kUsage, std::string("the chat was saved with another ") + what)
        .Where(where)
        .Expected(text(expected))
        .Found(text(found))
        .Next("load it with the bundle that it was saved with");
  };
  check("dtype of the KV cache", {ours.kv_dtype, sizeof ours.kv_dtype}, {header.kv_dtype, sizeof header.kv_dtype});
  check("layout of its states", {ours.states, sizeof ours.states}, {header.states, sizeof header.states});
}

void CheckReplaces(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) return;
  const MappedFile file = OpenRegular(path, [&](std::string expected, std::string found) {
    return Error(Code::kUsage, "cannot read the saved chat").Where(path).Expected(expected).Found(found);
  });
  const ChatHeader ours;
  if (file.text().substr(0, sizeof ours.magic) == std::string_view(ours.magic, sizeof ours.magic)) return;
  throw Error(Code::kUsage, "a chat does not overwrite other files").Where(path).Next("give another name");
}

}  // namespace

SavedChat::SavedChat(std::string_view file, const std::string& where, const ChatHeader& ours, const StateTable& table,
                     const ChatLimits& limits) {
  const ChatHeader header = ReadHeader(file, where);
  CheckLength(header, file, where);
  if (header.tokens > static_cast<uint64_t>(limits.context_length)) {
    throw Error(Code::kUsage, "the saved chat is longer than the context")
        .Where(where)
        .Expected("at most " + std::to_string(limits.context_length) + " tokens")
        .Found(std::to_string(header.tokens))
        .Next("load the model with a larger context");
  }
  CheckModel(header, ours, where);
  const auto state_bytes = static_cast<uint64_t>(table.BytesAfter(static_cast<int64_t>(header.tokens)));
  if (header.state_bytes != state_bytes) {
    throw Damaged(where, std::to_string(state_bytes) + " bytes of states", std::to_string(header.state_bytes));
  }
  CheckHash(file, where);  // of no more bytes than this model's context can have
  tokens.resize(header.tokens);
  if (!tokens.empty()) std::memcpy(tokens.data(), file.data() + sizeof header, 4 * tokens.size());
  for (const int32_t id : tokens) {
    if (id >= 0 && id < limits.vocab_size) continue;
    throw Damaged(where, "token ids from 0 to " + std::to_string(limits.vocab_size - 1), std::to_string(id));
  }
  if (header.prompt_tokens > static_cast<uint64_t>(limits.prompt_tokens) || (!header.prompt_tokens && header.tokens)) {
    throw Damaged(where, "a prompt of 1 to " + std::to_string(limits.prompt_tokens) + " tokens",
                  std::to_string(header.prompt_tokens));
  }
  prompt_tokens = static_cast<int64_t>(header.prompt_tokens);
  chat = file.substr(sizeof header + 4 * tokens.size(), header.chat_bytes);
  states = reinterpret_cast<const uint8_t*>(file.data()) + StatesBegin(header);
}

void WriteChat(const std::string& path, ChatHeader header, const StateTable& table, const std::vector<int32_t>& tokens,
               std::string_view chat, const std::function<UnitsOfState(size_t)>& units) {
  if (chat.size() > kMaxChatBytes) {
    throw Error(Code::kUsage, "the chat to save")
        .Expected("at most " + std::to_string(kMaxChatBytes) + " bytes")
        .Found(std::to_string(chat.size()));
  }
  CheckReplaces(path);
  const auto length = static_cast<int64_t>(tokens.size());
  header.tokens = tokens.size();
  header.chat_bytes = chat.size();
  header.state_bytes = static_cast<uint64_t>(table.BytesAfter(length));
  const uint64_t begin = StatesBegin(header);
  AtomicFile file(path, begin + header.state_bytes + kDigestBytes);
  file.Write(&header, sizeof header);
  file.Write(tokens.data(), 4 * tokens.size());
  file.Write(chat.data(), chat.size());
  const uint8_t zeros[kStatesAlignment] = {};
  file.Write(zeros, begin - sizeof header - 4 * header.tokens - chat.size());
  for (size_t at = 0; length && at < table.all().size(); ++at) {
    const State& state = table.all()[at];
    const auto bytes = static_cast<size_t>(state.unit_bytes);
    const UnitsOfState of = units(at);
    for (const int32_t& number : of.numbers) {
      const uint8_t* const unit = of.data + static_cast<size_t>(number) * bytes;
      if (&number != &of.numbers.back()) {
        file.Write(unit, bytes);
        continue;
      }
      std::vector<uint8_t> last(unit, unit + bytes);
      state.ClearUnused(length, last.data());
      file.Write(last.data(), bytes);
    }
  }
  const std::string digest = Sha256(file.Written().text());
  file.Write(digest.data(), digest.size());
  file.Commit();
}

}  // namespace mlcpipe
