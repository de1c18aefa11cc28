// The part of the cost model that says how many drafted tokens to check (mlcpipe/runtime/serving/cost_model.py).
#include <algorithm>
#include <cmath>
#include <limits>

#include "serving/cost_model.h"

namespace mlcpipe::serving {
namespace {

constexpr double kMinSpeedup = 1.05;  // of drafts, in tokens per second
constexpr int64_t kTryEvery = 4;      // choices, one of which may try a number that seems worse
constexpr double kTrialShare = 0.01;  // of the time, that such trials may lose
constexpr double kMinTrialShare = 0.0025, kTrialDecay = 0.7;  // its minimum, and its factor after one without success
constexpr double kMaxLossSteps = 2;   // that one trial may lose
constexpr size_t kSamples = 5;        // measurements of a number of decode rows; their median counts
constexpr int64_t kFresh = 32;        // measurements, after which those of a number of rows may be stale
constexpr int64_t kStaleAfter = 2 * kFresh;  // after which a step without drafts is tried before others
constexpr double kPaceTolerance = 1.25;  // factor, in both directions, within which steps take what they usually take
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double MedianLow(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void Keep(std::vector<double>* values, double value) {
  if (values->size() == kSamples) values->erase(values->begin());
  values->push_back(value);
}

// The step with the most tokens per second; the first, without drafts, unless `kMinSpeedup` times it.
size_t Fastest(const std::vector<double>& tokens, const std::vector<double>& seconds) {
  size_t best = 0;
  double speed = kMinSpeedup * tokens[0] / seconds[0];
  for (size_t number = 1; number < tokens.size(); ++number) {
    if (tokens[number] <= speed * seconds[number]) continue;
    best = number;
    speed = tokens[number] / seconds[number];
  }
  return best;
}

}  // namespace

double CostModel::DecodeSeconds(const Load& load, int64_t most) {
  const auto wanted = static_cast<size_t>(std::max(load.decode, most));
  if (wanted >= curves_.expected.size()) MakeCurves(wanted + 1);
  return curves_.expected[static_cast<size_t>(load.decode)] + costs_[4] * static_cast<double>(load.decode_keys);
}

bool CostModel::MayDraft(const Load& load, int64_t most) {
  DecodeSeconds(load, load.decode + most);
  const auto [found, made] = may_draft_.try_emplace({load.decode, most}, false);
  if (!made) return found->second;
  std::vector<double> tokens;
  for (int64_t rows = load.decode; rows <= load.decode + most; ++rows) tokens.push_back(static_cast<double>(rows));
  const auto begin = curves_.hoped.begin() + load.decode;
  return found->second = Fastest(tokens, {begin, begin + most + 1}) > 0;
}

int64_t CostModel::DraftRows(const Load& load, const std::vector<double>& gains) {
  const auto first = static_cast<size_t>(load.decode), numbers = gains.size() + 1;
  DecodeSeconds(load, load.decode + static_cast<int64_t>(gains.size()));
  const double answers = static_cast<double>(load.decode);
  const double key_s = costs_[4] * static_cast<double>(load.decode_keys) / answers;
  std::vector<double> tokens{answers}, expected, hoped;
  for (const double gain : gains) tokens.push_back(tokens.back() + gain);
  for (size_t number = 0; number < numbers; ++number) {
    const double keys = (answers + static_cast<double>(number)) * key_s;
    expected.push_back(curves_.expected[first + number] + keys);
    hoped.push_back(curves_.hoped[first + number] + keys);
  }
  const size_t best = Fastest(tokens, expected);
  if (best) trial_share_ = kTrialShare;
  else if (on_trial_) trial_share_ = std::max(kMinTrialShare, kTrialDecay * trial_share_);
  on_trial_ = false;
  if (++choices_ % kTryEvery || !Usual()) return static_cast<int64_t>(best);
  return static_cast<int64_t>(Tried(load, best, tokens, expected, hoped));
}

// A number that may be better than the best, the most promising one, if trying it cannot lose much; else the best.
size_t CostModel::Tried(const Load& load, size_t best, const std::vector<double>& tokens,
                        const std::vector<double>& expected, const std::vector<double>& hoped) {
  const double speed = tokens[best] / expected[best], better = best ? speed : kMinSpeedup * speed;
  loss_budget_s_ = std::min(loss_budget_s_ + kTryEvery * trial_share_ * expected[best], kMaxLossSteps * expected[best]);
  const auto measured = measured_at_.find(load.decode);
  const int64_t age = count_ - (measured == measured_at_.end() ? -kStaleAfter : measured->second);
  const bool again = best && age >= kStaleAfter && tokens[0] > better * hoped[0];
  std::tuple<double, size_t, double> found{0, best, 0};
  for (size_t number = 0; number < (again ? 1 : tokens.size()); ++number) {
    if (number == best || tokens[number] <= better * hoped[number]) continue;
    const double lost_s = std::max(0.0, expected[number] - tokens[number] / speed);
    if (lost_s <= loss_budget_s_) found = std::max(found, {tokens[number] / hoped[number], number, lost_s});
  }
  if (std::get<0>(found) == 0) return best;
  loss_budget_s_ -= std::get<2>(found);
  on_trial_ = true;
  return std::get<1>(found);
}

// Seconds of steps of 0 to `size` - 1 decode rows, without keys. Kernels compute rows in blocks, so these times have steps: a
// number that was not measured is expected on the line between its measured neighbours, or follows the costs where one is
// missing. If it was not measured lately, the best that may be hoped for is the time of a smaller number, as in one block, and
// at most the rows per second of the best larger number.
void CostModel::MakeCurves(size_t size) {
  std::map<size_t, double> medians;
  for (const auto& [rows, times] : decode_times_) {
    if (static_cast<size_t>(rows) < size) medians[static_cast<size_t>(rows)] = MedianLow(times);
  }
  const auto cost = [this](size_t rows) { return std::max(costs_[0] + static_cast<double>(rows) * costs_[1], kMinS); };
  double scale = medians.empty() ? 1 : medians.begin()->second / cost(medians.begin()->first);
  std::vector<double> expected(size);
  for (size_t rows = 0; rows < size; ++rows) {
    if (const auto found = medians.find(rows); found != medians.end()) scale = found->second / cost(rows);
    expected[rows] = scale * cost(rows);
  }
  for (auto larger = medians.begin(); larger != medians.end(); ++larger) {
    if (larger == medians.begin()) continue;
    const auto smaller = std::prev(larger);
    const double row_s = (larger->second - smaller->second) / static_cast<double>(larger->first - smaller->first);
    for (size_t rows = smaller->first + 1; rows < larger->first; ++rows) {
      expected[rows] = smaller->second + static_cast<double>(rows - smaller->first) * row_s;
    }
  }
  std::vector<double> hoped = expected;
  const auto fresh = [&](size_t rows) {
    return medians.count(rows) && count_ - measured_at_.at(static_cast<int64_t>(rows)) < kFresh;
  };
  const bool any = std::any_of(medians.begin(), medians.end(), [&](const auto& one) { return fresh(one.first); });
  double row_s = kInfinity, least = 0;
  for (size_t rows = any ? size : 0; rows-- > 0;) {
    if (fresh(rows)) row_s = std::min(row_s, medians[rows] / static_cast<double>(rows));
    hoped[rows] = row_s < kInfinity ? row_s * static_cast<double>(rows) : 0;
  }
  for (size_t rows = 0; any && rows < size; ++rows) {
    if (fresh(rows)) least = medians[rows];
    hoped[rows] = std::min(expected[rows], std::max(least, hoped[rows]));
  }
  curves_ = {std::move(expected), std::move(hoped)};
}

// While steps of all sizes take longer or shorter than they did, the stored times stay, so that times of two sizes are never
// compared at different speeds. If the change lasts, all times are scaled alike.
void CostModel::ObserveDecode(int64_t rows, double seconds) {
  const auto measured = measured_at_.find(rows);
  const bool lately = measured != measured_at_.end() && count_ - measured->second < kFresh;
  if (decode_times_.count(rows) && (lately || !Usual())) {
    Keep(&paces_, seconds / MedianLow(decode_times_[rows]));
    measured_at_[rows] = count_;
  }
  if (Usual()) {
    std::vector<double>& times = decode_times_[rows];
    if (!lately) times.clear();
    Keep(&times, seconds);
    measured_at_[rows] = usual_at_ = count_;
  } else if (count_ - usual_at_ >= kFresh) {
    const double pace = MedianLow(paces_);
    for (auto& [size, times] : decode_times_) {
      for (double& one : times) one *= pace;
    }
    paces_.clear();
  }
}

// Whether the latest steps took about as long as earlier ones of as many rows.
bool CostModel::Usual() const {
  if (paces_.empty()) return true;
  const double pace = MedianLow(paces_);
  return 1 / kPaceTolerance < pace && pace < kPaceTolerance;
}

}  // namespace mlcpipe::serving
