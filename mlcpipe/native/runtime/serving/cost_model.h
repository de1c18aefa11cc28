// How long a step takes, learned from past steps (mlcpipe/runtime/serving/cost_model.py).
#ifndef MLCPIPE_RUNTIME_SERVING_COST_MODEL_H_
#define MLCPIPE_RUNTIME_SERVING_COST_MODEL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace mlcpipe::serving {

constexpr size_t kCosts = 6;
using Costs = std::array<double, kCosts>;  // in seconds, in the order of `Load::Features`

// The work of a step: rows by kind, and the keys that they attend to, summed over rows.
struct Load {
  int64_t decode = 0, decode_keys = 0, prefill = 0, prefill_keys = 0;

  // A decode pass, a decode row, a prefill pass, a prefill row, a key of each.
  Costs Features() const;
};

// The latest of some measurements.
class Samples {
 public:
  bool empty() const { return !size_; }
  void clear() { size_ = 0; }
  void Add(double value);
  void Scale(double factor);
  double Median() const;  // the lower one of two

 private:
  std::array<double, 5> values_{};  // the oldest first
  size_t size_ = 0;
};

class CostModel {
 public:
  // Of a model of 0.5 GB on two cores, before the first measurement.
  static constexpr Costs kDefault = {20e-3, 2e-3, 20e-3, 1.5e-3, 0.5e-6, 0.2e-6};

  static constexpr double kMinS = 1e-9;  // where keys seem to take all the time

  explicit CostModel(const Costs& costs = kDefault, bool learns = true) : costs_(costs), prior_(costs), learns_(learns) {}

  // Expected for a step.
  double Seconds(const Load& load) const;
  // How many prompt rows, at most `most`, the first at position `depth`, fit into a step of `step_s` beside this load. A
  // multiple of a page, at least one: prompts continue, however slow the device is.
  int64_t PromptRows(const Load& load, double step_s, int64_t depth, int64_t most) const;
  // How many decode rows cost as much as these prefill rows, at least one.
  int64_t DecodeRowsFor(int64_t prefill) const;
  // Expected for a step of decode rows alone; the curves then cover steps of up to `most` rows.
  double DecodeSeconds(const Load& load, int64_t most = 0);
  // Whether up to `most` drafted tokens, if all are accepted, may be worth their rows, keys aside.
  bool MayDraft(const Load& load, int64_t most);
  // How many drafted tokens to check in a step of this load, of decode rows alone, to maximize tokens per second. Each adds a
  // row, and is accepted with the probability in `gains`, the largest first. One call in some tries another number.
  int64_t DraftRows(const Load& load, const std::vector<double>& gains);
  // How many tokens, up to `most`, a head should draft for each of some answers of this load, to maximize tokens per second.
  // Each is accepted with the answer's rate if those before it are; one for each answer takes `token_s`.
  int64_t DraftLength(const Load& load, const std::vector<double>& rates, double token_s, int64_t most);
  // A step of this load took so long.
  void Observe(const Load& load, double seconds);

 private:
  struct Measured {
    Costs features;
    double seconds;
  };
  using SizeClass = std::array<int, 3>;

  Costs costs_, prior_;
  bool learns_;
  int64_t count_ = 0;
  double margin_ = 1;  // what the longer ones of steps with answers and prompts took, of what the costs say
  std::map<SizeClass, std::vector<Measured>> measured_;
  // Of steps without prefill, by decode rows and without keys: the latest times, and when they were measured.
  std::map<int64_t, Samples> decode_times_;
  std::map<int64_t, int64_t> measured_at_;
  Samples paces_;          // of the latest steps, relative to others of as many rows
  int64_t usual_at_ = 0;   // the last measurement of the usual pace
  struct {
    std::vector<double> expected, hoped;  // seconds of steps, by decode rows
  } curves_;
  std::map<std::pair<int64_t, int64_t>, bool> may_draft_;  // what `MayDraft` found with these curves
  std::vector<double> tokens_, expected_, hoped_, medians_;  // by number, kept for their memory
  int64_t choices_ = 0;
  double loss_budget_s_ = 0, trial_share_ = 0.01;  // what trials may still lose, in seconds and of the time
  bool on_trial_ = false;                          // whether the last choice was one

  void Fit();
  void MakeCurves(size_t size);
  void ObserveDecode(int64_t rows, double seconds);
  bool Usual() const;
  // How many drafts maximize tokens per second: each gains tokens, takes `rows` rows, and `draft_s` to make.
  int64_t Choose(const Load& load, const std::vector<double>& gains, size_t rows, double draft_s);
  size_t Tried(const Load& load, size_t best);
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_COST_MODEL_H_
