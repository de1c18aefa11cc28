#include "chat_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>

#include "atomic_file.h"
#include "bundle/files.h"

namespace mlcpipe {
namespace {

constexpr uint64_t kPageAlignment = 64, kDigestBytes = 64, kMaxChatBytes = 16 << 20;

Error Damaged(const std::string& where, std::string expected, std::string found) {
  return Error(Code::kUsage, "the saved chat is damaged")
      .Where(where)
      .Expected(std::move(expected))
      .Found(std::move(found))
      .Next("save the chat again");
}

// Where the pages begin; of sizes that are no larger than a file's.
uint64_t PagesBegin(const ChatHeader& header) {
  const uint64_t end = sizeof header + 4 * header.tokens + header.chat_bytes;
  return (end + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
}

ChatHeader ReadHeader(std::string_view file, const std::string& where) {
  const ChatHeader ours;
  ChatHeader header;
  if (file.size() < sizeof header + kDigestBytes || std::memcmp(file.data(), ours.magic, sizeof ours.magic) != 0) {
    throw Error(Code::kUsage, "not a saved chat").Where(where).Expected("a file that /save or mlcpipe_save wrote");
  }
  std::memcpy(&header, file.data(), sizeof header);
  if (header.version == ours.version) return header;
  throw Error(Code::kUsage, "a saved chat of another version of mlcpipe")
      .Where(where)
      .Expected("version " + std::to_string(ours.version))
      .Found(std::to_string(header.version));
}

// Length of the whole file.
void CheckLength(const ChatHeader& header, std::string_view file, const std::string& where) {
  const auto wrong_length = [&] {
    return Damaged(where, "the length that its header states", std::to_string(file.size()) + " bytes");
  };
  if (!header.page_tokens || header.tokens > file.size() || header.chat_bytes > kMaxChatBytes) throw wrong_length();
  const uint64_t begin = PagesBegin(header) + kDigestBytes, pages = header.pages();
  const uint64_t page = uint64_t{header.layers} * header.page_bytes;
  if (begin > file.size()) throw wrong_length();
  const uint64_t left = file.size() - begin;
  if (pages ? page > left / pages || page * pages != left : left) throw wrong_length();
}

void CheckHash(std::string_view file, const std::string& where) {
  const std::string_view digest = file.substr(file.size() - kDigestBytes);
  if (Sha256(file.substr(0, file.size() - kDigestBytes)) != digest) {
    throw Damaged(where, "the content that was written", "other bytes");
  }
}

// The model, and how its keys and values are kept.
void CheckModel(const ChatHeader& header, const ChatHeader& ours, const std::string& where) {
  if (std::memcmp(header.model, ours.model, sizeof ours.model) != 0) {
    throw Error(Code::kUsage, "the chat was saved with another model")
        .Where(where)
        .Expected("the checkpoint and quantization of this one")
        .Next("load it with the model that it was saved with");
  }
  const auto check = [&](const char* field, const std::string& expected, const std::string& found) {
    if (expected == found) return;
    throw Error(Code::kUsage, "the chat was saved with another " + std::string(field) + " of the KV cache")
        .Where(where)
        .Expected(expected)
        .Found(found)
        .Next("load it with the bundle that it was saved with");
  };
  const auto text = [](const char (&name)[8]) {
    std::string line(name, strnlen(name, sizeof name));
    for (char& c : line) c = c < 32 || c > 126 ? '?' : c;
    return line;
  };
  check("kv_dtype", text(ours.kv_dtype), text(header.kv_dtype));
  const std::pair<const char*, uint32_t ChatHeader::*> kNumbers[] = {{"page_tokens", &ChatHeader::page_tokens},
                                                                     {"layers", &ChatHeader::layers},
                                                                     {"kv_heads", &ChatHeader::kv_heads},
                                                                     {"page_bytes", &ChatHeader::page_bytes},
                                                                     {"head_dim", &ChatHeader::head_dim}};
  for (const auto& [name, field] : kNumbers) check(name, std::to_string(ours.*field), std::to_string(header.*field));
}

// Makes the places of no token in the last of a layer's pages 0.
void ClearUnused(const ChatHeader& header, uint8_t* page) {
  const uint64_t used = header.tokens % header.page_tokens, places = header.page_tokens;
  const uint64_t head_bytes = header.page_bytes / header.kv_heads;
  // Of q8 and q4 the scales follow, which are fewer than the codes; q4 has two codes in a byte.
  const bool two = std::strncmp(header.kv_dtype, "q4", sizeof header.kv_dtype) == 0;
  const bool codes = two || std::strncmp(header.kv_dtype, "q8", sizeof header.kv_dtype) == 0;
  const uint64_t width = header.head_dim / (two ? 2 : 1);  // elements of a token
  const uint64_t item = codes ? 1 : head_bytes / (2 * places * width);
  const auto clear_columns = [&](uint8_t* rows, uint64_t bytes, uint64_t item_bytes) {
    for (uint64_t row = 0; row < bytes; row += places * item_bytes) {
      std::memset(rows + row + used * item_bytes, 0, (places - used) * item_bytes);
    }
  };
  const uint64_t half = places * width * item;
  for (uint32_t head = 0; head < header.kv_heads; ++head, page += head_bytes) {
    clear_columns(page, half, item);
    std::memset(page + half + used * width * item, 0, (places - used) * width * item);
    clear_columns(page + 2 * half, head_bytes - 2 * half, 2);
  }
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

SavedChat::SavedChat(std::string_view file, const std::string& where, const ChatHeader& ours,
                     const ChatLimits& limits) {
  const ChatHeader header = ReadHeader(file, where);
  CheckLength(header, file, where);
  CheckModel(header, ours, where);
  if (header.tokens > static_cast<uint64_t>(limits.context_length)) {
    throw Error(Code::kUsage, "the saved chat is longer than the context")
        .Where(where)
        .Expected("at most " + std::to_string(limits.context_length) + " tokens")
        .Found(std::to_string(header.tokens))
        .Next("load the model with a larger context");
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
  pages = reinterpret_cast<const uint8_t*>(file.data()) + PagesBegin(header);
}

void WriteChat(const std::string& path, ChatHeader header, const Sequence& sequence, std::string_view chat,
               const std::function<PagesOfLayer(size_t)>& layer) {
  if (chat.size() > kMaxChatBytes) {
    throw Error(Code::kUsage, "the chat to save")
        .Expected("at most " + std::to_string(kMaxChatBytes) + " bytes")
        .Found(std::to_string(chat.size()));
  }
  CheckReplaces(path);
  header.tokens = static_cast<uint64_t>(sequence.length);
  header.prompt_tokens = static_cast<uint64_t>(sequence.length ? sequence.prompt_length : 0);
  header.chat_bytes = chat.size();
  const uint64_t begin = PagesBegin(header), pages = header.pages(), bytes = header.page_bytes;
  AtomicFile file(path, begin + pages * bytes * header.layers + kDigestBytes);
  file.Write(&header, sizeof header);
  file.Write(sequence.tokens.data(), 4 * header.tokens);
  file.Write(chat.data(), chat.size());
  const uint8_t zeros[kPageAlignment] = {};
  file.Write(zeros, begin - sizeof header - 4 * header.tokens - chat.size());
  std::vector<uint8_t> last(bytes);
  for (size_t of = 0; pages && of < header.layers; ++of) {
    const auto [data, numbers] = layer(of);
    for (uint64_t number = 0; number < pages; ++number) {
      const uint8_t* page = data + (numbers ? static_cast<uint64_t>(numbers[number]) : number) * bytes;
      if (number + 1 == pages && header.tokens % header.page_tokens) {
        page = static_cast<const uint8_t*>(std::memcpy(last.data(), page, bytes));
        ClearUnused(header, last.data());
      }
      file.Write(page, bytes);
    }
  }
  const std::string digest = Sha256(file.Written().text());
  file.Write(digest.data(), digest.size());
  file.Commit();
}

}  // namespace mlcpipe
