// Byte pair encoding of one word at a time.
#ifndef MLCPIPE_RUNTIME_TEXT_TOKENIZER_MERGES_H_
#define MLCPIPE_RUNTIME_TEXT_TOKENIZER_MERGES_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer_tables.h"

namespace mlcpipe {

// Not to be shared between threads.
class Merger {
 public:
  struct Symbol {
    uint32_t id;
    uint32_t bytes;  // of the word; 0 once it is merged into another
    int32_t before, after;
  };

  explicit Merger(const TokenizerTables& tables) : tables_(tables) {}

  // The tokens of a word, which stay until the next call.
  const std::vector<Symbol>& Encode(std::string_view word);

 private:
  struct Merge {
    uint64_t order;  // rank, then place
    uint32_t merged;
    bool operator<(const Merge& other) const { return order > other.order; }  // the first is the greatest of a heap
  };

  void Begin(std::string_view word);
  void Add(uint32_t id, uint32_t bytes);
  void Consider(int32_t place);

  const TokenizerTables& tables_;
  std::vector<Symbol> symbols_;
  std::vector<Merge> heap_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_TOKENIZER_MERGES_H_
