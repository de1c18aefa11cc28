// The text of a bundle: its tokenizer and its chat template.
#ifndef MLCPIPE_RUNTIME_TEXT_BUNDLE_TEXT_H_
#define MLCPIPE_RUNTIME_TEXT_BUNDLE_TEXT_H_

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "bundle/files.h"
#include "text/template.h"
#include "text/tokenizer.h"

namespace mlcpipe {

// Safe to share between threads.
class BundleText {
 public:
  // Maps `tokenizer.bin` and `template.bin`. Throws kTokenizer for a bundle without a tokenizer.
  explicit BundleText(const Files& files);

  // Whether a bundle has a tokenizer.
  static bool In(const Files& files);

  const Tokenizer& tokenizer() const { return tokenizer_; }

  // Token ids of a conversation: JSON of the messages, a list of objects, and of an object with more variables of the
  // template, or "". Throws kTemplate for a bundle without a template, and what templates and tokenizers throw.
  std::vector<uint32_t> EncodeChat(std::string_view messages, std::string_view variables) const;

  // The text that the template makes of it.
  std::string Render(std::string_view messages, std::string_view variables) const;

  // Whether answers to conversations are in the harmony format.
  bool harmony() const { return template_ && template_->harmony(); }

  // Tokens that end an answer.
  std::vector<uint32_t> Ends() const;

 private:
  MappedFile tokenizer_file_;
  std::optional<MappedFile> template_file_;
  Tokenizer tokenizer_;
  std::optional<chat::Template> template_;

  const chat::Template& RequiredTemplate() const;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_BUNDLE_TEXT_H_
