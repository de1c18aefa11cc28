// Text to tokens as `tokenizers` encodes it, over a mapped tokenizer.bin.
#ifndef MLCPIPE_RUNTIME_TEXT_TOKENIZER_H_
#define MLCPIPE_RUNTIME_TEXT_TOKENIZER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer_tables.h"

namespace mlcpipe {

// Safe to share between threads.
class Tokenizer {
 public:
  // `data` must stay, and lie at a multiple of 8. Throws Error of Code::kTokenizer for a damaged file.
  Tokenizer(const void* data, size_t bytes) : tables_(data, bytes) {}

  // Token ids of UTF-8; special tokens written in the text become their ids. `add_special_tokens` adds what the
  // tokenizer puts around a plain text. Throws Error for a text that is too long or no UTF-8, and for a token that
  // the model has no row for.
  std::vector<uint32_t> Encode(std::string_view text, bool add_special_tokens = false) const;

  const TokenizerTables& tables() const { return tables_; }

 private:
  TokenizerTables tables_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_TOKENIZER_H_
