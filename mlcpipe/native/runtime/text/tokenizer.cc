#include "tokenizer.h"

#include <algorithm>

#include "tokenizer_encoder.h"
#include "utf8.h"

namespace mlcpipe {

void Tokenizer::Check(std::string_view text) const {
  size_t valid = utf8::ValidPrefix(text);
  if (valid != text.size()) {
    throw Error(Code::kTokenizer, "cannot encode the text")
        .Expected("UTF-8")
        .Found("other bytes at " + std::to_string(valid));
  }
  auto chars = std::count_if(text.begin(), text.end(), [](char c) { return !utf8::IsContinuation(c); });
  if (static_cast<uint64_t>(chars) > tables_.settings.most_chars) {
    throw Error(Code::kTokenizer, "the text is too long")
        .Expected("at most " + std::to_string(tables_.settings.most_chars) + " characters")
        .Found(std::to_string(chars));
  }
}

void Tokenizer::CheckRows(const std::vector<uint32_t>& ids) const {
  auto largest = std::max_element(ids.begin(), ids.end());
  if (largest == ids.end() || *largest < tables_.settings.rows) return;
  throw Error(Code::kTokenizer, "a token has no row in the model's embedding")
      .Where(std::string(tables_.Piece(*largest, false)))
      .Expected("ids below " + std::to_string(tables_.settings.rows))
      .Found(std::to_string(*largest))
      .Next("leave it out of the text");
}

std::vector<uint32_t> Tokenizer::Encode(std::string_view text, bool add_special_tokens) const {
  Check(text);
  std::vector<uint32_t> ids = Encoder(tables_, text, false).Encode(false).ids;
  if (add_special_tokens) {
    const uint32_t* middle = tables_.around.begin() + tables_.settings.ids_before;
    ids.insert(ids.begin(), tables_.around.begin(), middle);
    ids.insert(ids.end(), middle, tables_.around.end());
  }
  CheckRows(ids);
  return ids;
}

}  // namespace mlcpipe
