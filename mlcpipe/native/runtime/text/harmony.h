// Answers in OpenAI's harmony format, which gpt-oss writes, as mlcpipe/runtime/text/harmony.py.
#ifndef MLCPIPE_RUNTIME_TEXT_HARMONY_H_
#define MLCPIPE_RUNTIME_TEXT_HARMONY_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/text_stream.h"

namespace mlcpipe::harmony {

// What a chat template of this format mentions.
inline constexpr std::string_view kStart = "<|start|>", kChannel = "<|channel|>", kMessage = "<|message|>";

// The tokens that have a place in the format.
std::vector<uint32_t> Marks(const Tokenizer& tokenizer);

// An answer's text without the thoughts that `Text` writes.
std::string WithoutThoughts(std::string_view text);

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
