// Changes a text before its tokens are looked for, as the normalizer of a tokenizer.json says.
#ifndef MLCPIPE_RUNTIME_TEXT_NORMALIZER_H_
#define MLCPIPE_RUNTIME_TEXT_NORMALIZER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pattern.h"
#include "tokenizer_tables.h"

namespace mlcpipe {

// Bytes of the text that a caller gave.
struct TextSpan {
  uint32_t begin, end;
};

// A text that is changed, and where each of its bytes comes from, if that is asked.
struct ChangingText {
  std::string text;
  std::vector<TextSpan> origins;
  bool has_origins = false;

  void Prepend(std::string_view begin);
  void Append(std::string_view part, TextSpan origin);
};

// Changes `text` by all steps.
void Normalize(const TokenizerTables& tables, Matcher* matcher, ChangingText* text);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_NORMALIZER_H_
