// How long a step takes, learned from past steps (mlcpipe/runtime/serving/cost_model.py).
#ifndef MLCPIPE_RUNTIME_SERVING_COST_MODEL_H_
#define MLCPIPE_RUNTIME_SERVING_COST_MODEL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
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

class CostModel {
 public:
  // Of a model of 0.5 GB on two cores, before the first measurement.
  static constexpr Costs kDefault = {20e-3, 2e-3, 20e-3, 1.5e-3, 0.5e-6, 0.2e-6};

  explicit CostModel(const Costs& costs = kDefault, bool learns = true) : costs_(costs), prior_(costs), learns_(learns) {}

  // Expected for a step.
  double Seconds(const Load& load) const;
  // How many prompt rows, at most `most`, the first at position `depth`, fit into a step of `step_s` beside this load. A
  // multiple of a page, at least one: prompts continue, however slow the device is.
  int64_t PromptRows(const Load& load, double step_s, int64_t depth, int64_t most) const;
  // How many decode rows cost as much as these prefill rows, at least one.
  int64_t DecodeRowsFor(int64_t prefill) const;
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

  void Fit();
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_COST_MODEL_H_
