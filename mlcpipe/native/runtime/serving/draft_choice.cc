// The part of the cost model that says how many drafted tokens to check (mlcpipe/runtime/serving/cost_model.py).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "serving/cost_model.h"

namespace mlcpipe::serving {
namespace {

constexpr double kMinSpeedup = 1.05;  // of drafts, in tokens per second
constexpr int64_t kTryEvery = 4;      // choices, one of which may try a number that seems worse
constexpr double kTrialShare = 0.01;  // of the time, that such trials may lose
constexpr double kMinTrialShare = 0.0025, kTrialDecay = 0.7;  // its minimum, and its factor after one without success
constexpr double kMaxLossSteps = 2;   // that one trial may lose
constexpr int64_t kFresh = 32;        // measurements, after which those of a number of rows may be stale
constexpr int64_t kStaleAfter = 2 * kFresh;  // after which a step without drafts is tried before others
constexpr double kPaceTolerance = 1.25;  // factor, in both directions, within which steps take what they usually take
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The step with the most tokens per second; the first, without drafts, unless `kMinSpeedup` times it.
size_t Fastest(const std::vector<double>& tokens, const double* seconds) {
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

void Samples::Add(double value) {
  if (size_ == values_.size()) std::copy(values_.begin() + 1, values_.end(), values_.begin());
  else ++size_;
  values_[size_ - 1] = value;
}

void Samples::Scale(double factor) {
  for (double& one : values_) one *= factor;
}

double Samples::Median() const {
  auto values = values_;
  const auto end = values.begin() + static_cast<std::ptrdiff_t>(size_);
  std::sort(values.begin(), end);
  return values[(size_ - 1) / 2];
}

double CostModel::DecodeSeconds(const Load& load, int64_t most) {
  const auto wanted = static_cast<size_t>(std::max(load.decode, most));
  if (wanted >= curves_.expected.size()) MakeCurves(wanted + 1);
  return curves_.expected[static_cast<size_t>(load.decode)] + costs_[4] * static_cast<double>(load.decode_keys);
}

bool CostModel::MayDraft(const Load& load, int64_t most) {
  DecodeSeconds(load, load.decode + most);
  const auto [found, made] = may_draft_.try_emplace({load.decode, most}, false);
  if (!made) return found->second;
  tokens_.clear();
  for (int64_t rows = load.decode; rows <= load.decode + most; ++rows) tokens_.push_back(static_cast<double>(rows));
  return found->second = Fastest(tokens_, curves_.hoped.data() + load.decode) > 0;
}

int64_t CostModel::DraftRows(const Load& load, const std::vector<double>& gains) { return Choose(load, gains, 1, 0); }

int64_t CostModel::DraftLength(const Load& load, const std::vector<double>& rates, double token_s, int64_t most) {
  std::vector<double> gains;
  for (int64_t length = 1; length <= most; ++length) {
    const auto gain = [&](double sum, double rate) { return sum + std::pow(rate, static_cast<double>(length)); };
    gains.push_back(std::accumulate(rates.begin(), rates.end(), 0.0, gain));
  }
  return Choose(load, gains, rates.size(), token_s);
}

int64_t CostModel::Choose(const Load& load, const std::vector<double>& gains, size_t rows, double draft_s) {
  const auto first = static_cast<size_t>(load.decode), numbers = gains.size() + 1;
  DecodeSeconds(load, load.decode + static_cast<int64_t>(gains.size() * rows));
  const double answers = static_cast<double>(load.decode);
  const double key_s = costs_[4] * static_cast<double>(load.decode_keys) / answers;
  tokens_.assign(1, answers);
  expected_.clear();
  hoped_.clear();
  for (const double gain : gains) tokens_.push_back(tokens_.back() + gain);
  for (size_t number = 0; number < numbers; ++number) {
    const double more = answers * key_s + (static_cast<double>(rows) * key_s + draft_s) * static_cast<double>(number);
    expected_.push_back(curves_.expected[first + number * rows] + more);
    hoped_.push_back(curves_.hoped[first + number * rows] + more);
  }
  const size_t best = Fastest(tokens_, expected_.data());
  if (best) trial_share_ = kTrialShare;
  else if (on_trial_) trial_share_ = std::max(kMinTrialShare, kTrialDecay * trial_share_);
  on_trial_ = false;
  if (++choices_ % kTryEvery || !Usual()) return static_cast<int64_t>(best);
  return static_cast<int64_t>(Tried(load, best));
}

// A number that may be better than the best, the most promising one, if trying it cannot lose much; else the best.
size_t CostModel::Tried(const Load& load, size_t best) {
  const auto &tokens = tokens_, &expected = expected_, &hoped = hoped_;
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
  medians_.assign(size, 0);  // 0 where none was measured
  bool scaled = false, any = false;
  const auto cost = [this](size_t rows) { return std::max(costs_[0] + static_cast<double>(rows) * costs_[1], kMinS); };
  const auto fresh = [this](size_t rows) {
    return medians_[rows] > 0 && count_ - measured_at_.at(static_cast<int64_t>(rows)) < kFresh;
  };
  double scale = 1;
  for (const auto& [rows, times] : decode_times_) {
    const auto at = static_cast<size_t>(rows);
    if (at >= size || times.empty()) continue;
    medians_[at] = times.Median();
    if (!std::exchange(scaled, true)) scale = medians_[at] / cost(at);
    any = any || fresh(at);
  }
  std::vector<double>&expected = curves_.expected, &hoped = curves_.hoped;
  expected.resize(size);
  size_t smaller = size;
  for (size_t rows = 0; rows < size; ++rows) {
    if (medians_[rows] > 0) scale = medians_[rows] / cost(rows);
    expected[rows] = scale * cost(rows);
    if (medians_[rows] <= 0) continue;
    for (size_t at = smaller + 1; at < rows; ++at) {  // none before the first that was measured
      const double row_s = (medians_[rows] - medians_[smaller]) / static_cast<double>(rows - smaller);
      expected[at] = medians_[smaller] + static_cast<double>(at - smaller) * row_s;
    }
    smaller = rows;
  }
  hoped = expected;
  double row_s = kInfinity, least = 0;
  for (size_t rows = any ? size : 0; rows-- > 0;) {
    if (fresh(rows)) row_s = std::min(row_s, medians_[rows] / static_cast<double>(rows));
    hoped[rows] = row_s < kInfinity ? row_s * static_cast<double>(rows) : 0;
  }
  for (size_t rows = 0; any && rows < size; ++rows) {
    if (fresh(rows)) least = medians_[rows];
    hoped[rows] = std::min(expected[rows], std::max(least, hoped[rows]));
  }
}

// While steps of all sizes take longer or shorter than they did, the stored times stay, so that times of two sizes are never
// compared at different speeds. If the change lasts, all times are scaled alike.
void CostModel::ObserveDecode(int64_t rows, double seconds) {
  const auto measured = measured_at_.find(rows);
  const bool lately = measured != measured_at_.end() && count_ - measured->second < kFresh;
  Samples& times = decode_times_[rows];
  if (!times.empty() && (lately || !Usual())) {
    paces_.Add(seconds / times.Median());
    measured_at_[rows] = count_;
  }
  if (Usual()) {
    if (!lately) times.clear();
    times.Add(seconds);
    measured_at_[rows] = usual_at_ = count_;
  } else if (count_ - usual_at_ >= kFresh) {
    const double pace = paces_.Median();
    for (auto& [size, one] : decode_times_) one.Scale(pace);
    paces_.clear();
  }
}

// Whether the latest steps took about as long as earlier ones of as many rows.
bool CostModel::Usual() const {
  if (paces_.empty()) return true;
  const double pace = paces_.Median();
  return 1 / kPaceTolerance < pace && pace < kPaceTolerance;
}

}  // namespace mlcpipe::serving
