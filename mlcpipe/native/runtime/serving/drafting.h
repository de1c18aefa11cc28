// Drafts of answers from their own texts (mlcpipe/runtime/serving/drafting.py), which the model checks several at a time. They
// never change an answer: a drafted token is accepted only where sampling draws it.
#ifndef MLCPIPE_RUNTIME_SERVING_DRAFTING_H_
#define MLCPIPE_RUNTIME_SERVING_DRAFTING_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mlcpipe::serving {

constexpr int64_t kMostDrafted = 15;  // tokens of all drafts of a step

// Tokens that may come next. Each is right with probability `rate` if those before it are.
struct Draft {
  std::vector<int32_t> tokens;
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

// Finds the last tokens of an answer in its prompt and in the answer: what followed there is the draft (prompt lookup decoding,
// Saxena 2023). How often a match of a length was right is learned from every token, drafted or not.
class Lookup {
 public:
  // A draft goes up to one of `stops`.
  explicit Lookup(const std::set<int32_t>& stops) : stops_(stops) { rates_.fill(kFirstRate); }

  // What may follow these tokens, prompt and answer; they only grow from call to call.
  Draft Propose(const std::vector<int32_t>& tokens);

 private:
  static constexpr double kFirstRate = 0.5;
  static constexpr size_t kMostMatch = 8;  // tokens in common: a ninth says no more

  const std::set<int32_t> stops_;
  std::vector<int32_t> text_, guess_;
  std::unordered_map<uint64_t, size_t> latest_;  // where a pair of tokens ended last
  std::vector<size_t> earlier_{0};  // for each end of a pair, where the same pair ended before; 0 is nowhere
  std::array<double, kMostMatch + 1> rates_;  // by the length of a match
  size_t match_ = 0;

  void Learn(const int32_t* begin, const int32_t* end);
  void Extend(const int32_t* begin, const int32_t* end);
  std::pair<size_t, size_t> Find() const;
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_DRAFTING_H_
