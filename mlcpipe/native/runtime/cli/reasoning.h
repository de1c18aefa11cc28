// Tells what a model thinks, between <think> and </think>, from its answer: mlcpipe/server/reasoning.py.
#ifndef MLCPIPE_RUNTIME_CLI_REASONING_H_
#define MLCPIPE_RUNTIME_CLI_REASONING_H_

#include <algorithm>
#include <string>
#include <string_view>

#include "cli/openai.h"

namespace mlcpipe::cli {

// Reasoning is at the beginning of an answer or nowhere. White space around the tags is dropped.
class ReasoningSplitter {
 public:
  static constexpr std::string_view kBegin = "<think>", kEnd = "</think>";

  enum State { kBefore, kInside, kAfter, kAnswer };
  // kInside where the prompt has begun the reasoning already, kAnswer where there is none.
  explicit ReasoningSplitter(State state) : state_(state) {}

  bool inside() const { return state_ == kInside; }

  // Takes text as it comes, gives back what is certain now.
  Delta Push(std::string_view text) {
    std::string rest = held_.append(text);
    held_.clear();
    Delta delta;
    while (!rest.empty()) {
      if (state_ == kBefore) {
        const std::string start = rest.substr(SpacesBefore(rest));
        if (start.compare(0, kBegin.size(), kBegin) == 0) {
          rest = start.substr(kBegin.size());
          state_ = kInside;
        } else if (kBegin.substr(0, start.size()) == start) {
          held_ = rest;
          break;
        } else {
          state_ = kAnswer;
        }
      } else if (state_ == kInside) {
        const size_t at = rest.find(kEnd);
        const size_t shown = at == std::string::npos ? rest.size() - Overlap(rest) : at;
        delta.reasoning += Trimmed(rest.substr(0, shown));
        if (at == std::string::npos) {
          held_ = rest.substr(shown);
          break;
        }
        rest.erase(0, at + kEnd.size());
        state_ = kAfter;
      } else if (state_ == kAfter) {
        rest.erase(0, SpacesBefore(rest));
        if (!rest.empty()) state_ = kAnswer;
      } else {
        delta.text = rest;
        break;
      }
    }
    return delta;
  }

  // The rest, when no more comes.
  Delta Finish() const {
    if (state_ == kInside) return {"", held_.empty() ? "" : space_ + held_};
    return {held_, ""};
  }

 private:
  State state_;
  std::string held_, space_;
  bool begun_ = false;

  static bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

  static size_t SpacesBefore(const std::string& text) {
    size_t count = 0;
    while (count < text.size() && IsSpace(text[count])) ++count;
    return count;
  }

  // Bytes at the end of a text that may begin the tag.
  static size_t Overlap(const std::string& text) {
    size_t count = std::min(text.size(), kEnd.size() - 1);
    while (text.compare(text.size() - count, count, kEnd.substr(0, count)) != 0) --count;
    return count;
  }

  // Without spaces before the first word; those behind the last one wait for another.
  std::string Trimmed(const std::string& text) {
    std::string whole = begun_ ? space_ + text : text.substr(SpacesBefore(text));
    size_t kept = whole.size();
    while (kept && IsSpace(whole[kept - 1])) --kept;
    space_ = whole.substr(kept);
    whole.resize(kept);
    begun_ = begun_ || kept;
    return whole;
  }
};

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_REASONING_H_
