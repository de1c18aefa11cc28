// Drafts of answers from their own texts (mlcpipe/runtime/serving/drafting.py), which the model checks several at a time. They
// never change an answer: a drafted token is accepted only where sampling draws it.
#ifndef MLCPIPE_RUNTIME_SERVING_DRAFTING_H_
#define MLCPIPE_RUNTIME_SERVING_DRAFTING_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace mlcpipe::serving {

constexpr int64_t kMostDrafted = 15;  // tokens of all drafts of a step

// The tokens of a step: a draft, or what was drawn after the last token and after each of its draft. Takes no memory of its own.
class FewTokens {
 public:
  const int32_t* begin() const { return tokens_.data(); }
  const int32_t* end() const { return begin() + size_; }
  size_t size() const { return size_; }
  bool empty() const { return !size_; }
  int32_t operator[](size_t at) const { return tokens_[at]; }
  void push_back(int32_t token) { tokens_[size_++] = token; }
  void Cut(int64_t most) { size_ = std::min(size_, static_cast<size_t>(std::max<int64_t>(0, most))); }

 private:
  std::array<int32_t, kMostDrafted + 1> tokens_{};
  size_t size_ = 0;
};

// Tokens that may come next. Each is right with probability `rate` if those before it are.
struct Draft {
  FewTokens tokens;
  double rate = 0;
};

// Whether to look for drafts in a step, which takes time: not in all where that is more than drafts saved lately.
class Search {
 public:
  // Whether to look in the next step.
  bool Pays();
  // Looking took `spent` of the `step` seconds, and its drafts saved `saved` of them, negative for a loss.
  void Learn(double spent, double saved, double step);

 private:
  double spent_ = 0, saved_ = 0, steps_ = 0;  // seconds of those that looked lately
  int64_t looks_ = 0, passed_ = 0;
};

// What a draft head proposes for an answer (`ModelDrafter` of draft_model.py).
class HeadDraft {
 public:
  // `common` is the head's rate: how often its drafts were accepted lately.
  HeadDraft(bool followed, double* common) : followed(followed), rate_(*common), common_(common) {}

  // Tokens that follow the first `length` of the answer.
  void Hold(const FewTokens& tokens, int64_t length);
  // The head's draft of a text of so many tokens, where those were right more often than what was found in texts; else that.
  Draft Choose(const Draft& found, int64_t length);
  // The model checked the first tokens of the last choice; so many were right.
  void Checked(int64_t drafted, int64_t right);
  double rate() const { return rate_; }

  const bool followed;  // whether the head keeps up with the answer

 private:
  FewTokens tokens_;
  int64_t length_ = 0, checked_ = 0;
  double rate_;
  double* common_;
  bool chosen_ = false;
};

// Finds the last tokens of an answer in its prompt and in the answer: what followed there is the draft (prompt lookup decoding,
// Saxena 2023). How often a match of a length was right is learned from every token, drafted or not.
class Lookup {
 public:
  // A draft goes up to one of `stops`.
  explicit Lookup(const std::set<int32_t>& stops);

  // What may follow these tokens, prompt and answer; they only grow from call to call.
  Draft Propose(const std::vector<int32_t>& tokens);

 private:
  static constexpr double kFirstRate = 0.5;
  static constexpr size_t kMostMatch = 8;  // tokens in common: a ninth says no more

  const std::set<int32_t> stops_;
  std::vector<int32_t> text_;
  FewTokens guess_;
  std::vector<uint32_t> latest_;   // where a pair of tokens ended last: open addressing, 0 is a free place
  std::vector<uint32_t> earlier_;  // for each end of a pair, where the same pair ended before; 0 is nowhere
  std::array<double, kMostMatch + 1> rates_;  // by the length of a match
  size_t match_ = 0;

  void Grow();
  uint32_t& LatestOf(int32_t before, int32_t token);
  void Learn(const int32_t* begin, const int32_t* end);
  void Extend(const int32_t* begin, const int32_t* end);
  std::pair<size_t, size_t> Find() const;
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_DRAFTING_H_
