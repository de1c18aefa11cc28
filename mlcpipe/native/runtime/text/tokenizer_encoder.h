// One call's way from a text to tokens: added tokens, normalizer, pre-tokenizer, model.
#ifndef MLCPIPE_RUNTIME_TEXT_TOKENIZER_ENCODER_H_
#define MLCPIPE_RUNTIME_TEXT_TOKENIZER_ENCODER_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "normalizer.h"
#include "pattern.h"
#include "tokenizer_merges.h"
#include "tokenizer_tables.h"

namespace mlcpipe {

struct Encoding {
  std::vector<uint32_t> ids;
  std::vector<TextSpan> spans;  // of each token in the text, where they are asked for
};

class Encoder {
 public:
  Encoder(const TokenizerTables& tables, std::string_view text, bool with_spans)
      : tables_(tables),
        text_(text),
        with_spans_(with_spans),
        matcher_(tables.patterns, text.size()),
        merger_(tables) {}

  // The text's tokens, without those around it. `plain` takes tokens that steer the model for text.
  Encoding Encode(bool plain);

 private:
  // A part of the text, perhaps changed. Where spans are asked for, `origins` has those of a changed one's bytes.
  struct Part {
    std::string_view text;
    const TextSpan* origins;
    uint32_t offset;  // in the whole text, of a part that is not changed
    bool first;       // whether it begins the whole text

    Part Sub(size_t begin, size_t end) const {
      return {text.substr(begin, end - begin), origins ? origins + begin : nullptr,
              static_cast<uint32_t>(offset + begin), first && begin == 0};
    }
  };
  struct Cut {
    size_t begin, end;
    bool matches;
  };

  template <typename Token, typename Rest>
  void CutAtAdded(const AddedTokens& added, const Part& part, bool plain, Token token, Rest rest);
  bool StandsAlone(std::string_view text, size_t begin, size_t end) const;
  void Unchanged(const Part& part, bool plain);
  void PreTokenize(size_t step, const Part& part);
  void Split(size_t step, const Part& part);
  void Change(size_t step, const Part& part);
  ChangingText Copy(const Part& part) const;
  void Word(const Part& part);
  void Add(uint32_t id, const Part& part, size_t begin, size_t end);

  const TokenizerTables& tables_;
  std::string_view text_;
  const bool with_spans_;
  Matcher matcher_;
  Merger merger_;
  Encoding made_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_TOKENIZER_ENCODER_H_
