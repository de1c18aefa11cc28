// Text to tokens as `tokenizers` encodes it, over a mapped tokenizer.bin.
#ifndef MLCPIPE_RUNTIME_TEXT_TOKENIZER_H_
#define MLCPIPE_RUNTIME_TEXT_TOKENIZER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer_tables.h"

namespace mlcpipe {

// A part of a rendered prompt: the template's own text, or what a message says.
struct ChatPart {
  std::string_view text;
  bool is_content;
};

// Safe to share between threads.
class Tokenizer {
 public:
  // `data` must stay, and lie at a multiple of 8. Throws Error of Code::kTokenizer for a damaged file.
  Tokenizer(const void* data, size_t bytes) : tables_(data, bytes) {}

  // Token ids of UTF-8; special tokens written in the text become their ids. `add_special_tokens` adds what the
  // tokenizer puts around a plain text. Throws Error for a text that is too long or no UTF-8, and for a token that
  // the model has no row for.
  std::vector<uint32_t> Encode(std::string_view text, bool add_special_tokens = false) const;

  // Token ids of a prompt; a control token that is written in a content is encoded as the text that it is.
  std::vector<uint32_t> EncodeChat(const std::vector<ChatPart>& parts) const;

  // The text of tokens, as `tokenizers` decodes it; broken UTF-8 becomes U+FFFD.
  std::string Decode(const std::vector<uint32_t>& ids, bool skip_special_tokens = true) const;

  const TokenizerTables& tables() const { return tables_; }

 private:
  void Check(std::string_view text) const;
  void CheckRows(const std::vector<uint32_t>& ids) const;

  TokenizerTables tables_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_TOKENIZER_H_
