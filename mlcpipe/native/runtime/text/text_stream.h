// Token ids to text that is safe to show at once, as mlcpipe/runtime/text/streaming.py.
#ifndef MLCPIPE_RUNTIME_TEXT_TEXT_STREAM_H_
#define MLCPIPE_RUNTIME_TEXT_TEXT_STREAM_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer.h"

namespace mlcpipe {

// Withholds the longest possible start of a stop string: Aho and Corasick, CACM 18(6), 1975. The first stop string to
// be complete wins; of those that end together, the longest.
class StopMatcher {
 public:
  // Throws Error of Code::kUsage for a stop string that is empty or no UTF-8.
  explicit StopMatcher(const std::vector<std::string>& stops);

  bool empty() const { return nodes_.size() == 1; }
  // The text to show; `found` is whether a stop string is complete. What follows is read as if it came first.
  std::string Push(std::string_view text, bool* found);
  // The withheld text, when no more comes.
  std::string Flush();
  const std::string& found() const { return found_; }

 private:
  // A prefix of a stop string.
  struct Node {
    std::map<char, uint32_t> children;
    uint32_t fail = 0;     // the longest proper suffix that is a prefix too
    size_t depth = 0;      // bytes
    size_t matched = 0;    // bytes of the longest stop string that ends here
  };

  uint32_t Next(uint32_t state, char c) const;

  std::vector<Node> nodes_;
  uint32_t state_ = 0;
  std::string held_, found_;
};

// Characters of bytes that come one after the other; what is not UTF-8 becomes U+FFFD, one for each longest part of a
// character.
class Utf8Stream {
 public:
  std::string Push(std::string_view bytes);
  std::string Flush();

 private:
  std::string held_;  // the begin of a character
};

struct StreamOptions {
  std::vector<std::string> stops;
  std::vector<uint32_t> ends;   // tokens that end the text
  std::vector<uint32_t> shown;  // special tokens that are written by name
  bool continues = false;       // keeps the space that starts the first token, for text that continues a prompt
};

// One object for one answer. The texts together are those of the tokens, cut before the stop; special ones are skipped.
class TextStream {
 public:
  // Throws Error of Code::kUsage for a stop string that is empty or no UTF-8.
  TextStream(const Tokenizer& tokenizer, StreamOptions options);

  // Text that is certain after this token; "" after a stop.
  std::string Push(uint32_t token);
  // The text still held back, when no more tokens come; "" after a stop.
  std::string Flush();
  // Whether a token of `ends` or a stop string came.
  bool stopped() const { return stopped_; }
  // The stop string that ended the text, or "".
  const std::string& stop_string() const { return stops_.found(); }

 private:
  friend class Tokenizer;
  enum class Run { kWhole, kLong, kBroken };  // long once characters were shown early, broken once it is no UTF-8

  std::string Put(std::string_view data, bool is_byte);
  std::string Finish();
  std::string Release(std::string text);
  std::string GrowRun(std::string_view data);
  std::string EndRun();
  std::string ReplacedRun();

  const TokenizerTables& tables_;
  StreamOptions options_;
  StopMatcher stops_;
  Utf8Stream utf8_;
  std::string run_;  // byte tokens, which are replaced one by one where they are no UTF-8 as a whole
  Run run_state_ = Run::kWhole;
  size_t max_run_;
  bool first_ = true, stopped_ = false;
  uint32_t strip_left_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_TEXT_STREAM_H_
