// Answers in OpenAI's harmony format, which gpt-oss writes, as mlcpipe/runtime/text/harmony.py.
#ifndef MLCPIPE_RUNTIME_TEXT_HARMONY_H_
#define MLCPIPE_RUNTIME_TEXT_HARMONY_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/text_stream.h"

namespace mlcpipe::harmony {

// Marks that a chat template of this format has.
inline constexpr std::string_view kStart = "<|start|>", kChannel = "<|channel|>", kMessage = "<|message|>";

// The tokens that have a place in the format.
std::vector<uint32_t> Marks(const Tokenizer& tokenizer);

// The beginning and end of thoughts that `Text` writes.
inline constexpr std::string_view kThinkBegin = "<think>\n", kThinkEnd = "\n</think>\n\n";

inline std::string_view Stripped(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\n\r\f\v"), text.size()));
  return text;
}

// An answer's text without its thoughts.
inline std::string WithoutThoughts(std::string_view text) {
  std::string kept;
  for (;;) {
    const size_t begin = text.find(kThinkBegin), end = text.find("</think>", begin);
    kept += text.substr(0, begin);
    if (begin == text.npos || end == text.npos) return kept;
    text = Stripped(text.substr(end + std::string_view("</think>").size()));
  }
}

// As `TextStream`, of all messages: thoughts are between `<think>` and `</think>`, as other models have them.
class Text {
 public:
  Text();

  // `text` is what a stream that shows the marks gives; the result is what is certain now.
  std::string Push(std::string_view text);
  // The rest, when no more comes than this.
  std::string Flush(std::string_view text);

 private:
  StopMatcher ends_;    // of a message
  std::string header_;  // so far
  bool in_header_ = true, begun_ = false;
  std::string channel_, last_;  // of the message, and of the text so far
  bool begins_ = false;         // whether a message has begun in `Flush`

  std::string ReadHeader(char c);
  std::string ReadText(char c);
  void Begin(std::string_view channel);
  std::string Shown(std::string_view text);
};

}  // namespace mlcpipe::harmony

#endif  // MLCPIPE_RUNTIME_TEXT_HARMONY_H_
