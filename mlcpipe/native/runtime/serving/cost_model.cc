#include "serving/cost_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "page.h"

namespace mlcpipe::serving {
namespace {

constexpr size_t kKept = 12;           // measurements of a class of sizes
constexpr double kPriorWeight = 0.02;  // of the default costs' ratios, against one measurement
constexpr double kOutlier = 0.15;      // a relative error at which a measurement counts half
constexpr int kRounds = 4;             // of reweighting
constexpr int64_t kEvery = 32;         // measurements between two fits, once there are as many
constexpr int64_t kCurvesEvery = 4;    // measurements, after which the times of decode rows are computed again
constexpr double kLate = 0.2;          // share of steps with answers and prompts that may take longer than they should
constexpr double kMostMargin = 1.3;    // outliers shall not stop prompts
constexpr size_t kEnough = 8;          // measurements of such steps, to say how long the longer ones take

double Dot(const Costs& a, const Costs& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// The least element that so large a share of all is not above, between two of them as their distance says.
double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double at = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

// Solves left x = right for the active rows and columns, by Gauss's elimination; `left` is positive definite.
Costs Solved(std::array<Costs, kCosts> left, Costs right, const std::array<bool, kCosts>& active) {
  for (size_t i = 0; i < kCosts; ++i) {
    for (size_t row = i + 1; active[i] && row < kCosts; ++row) {
      const double factor = active[row] ? left[row][i] / left[i][i] : 0;
      for (size_t k = i; k < kCosts; ++k) left[row][k] -= factor * left[i][k];
      right[row] -= factor * right[i];
    }
  }
  Costs solved{};
  for (size_t i = kCosts; i-- > 0;) {
    if (!active[i]) continue;
    double rest = right[i];
    for (size_t k = i + 1; k < kCosts; ++k) rest -= left[i][k] * solved[k];
    solved[i] = rest / left[i][i];
  }
  return solved;
}

// argmin over x >= 0 of sum of weights (rows x - 1)^2 + prior weight * |x - 1|^2; drops what would be negative.
Costs PositiveFit(const std::vector<Costs>& rows, const std::vector<double>& weights) {
  std::array<Costs, kCosts> left{};
  Costs right;
  right.fill(kPriorWeight);
  for (size_t i = 0; i < kCosts; ++i) left[i][i] = kPriorWeight;
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t i = 0; i < kCosts; ++i) {
      right[i] += weights[row] * rows[row][i];
      for (size_t k = 0; k < kCosts; ++k) left[i][k] += weights[row] * rows[row][i] * rows[row][k];
    }
  }
  std::array<bool, kCosts> active;
  active.fill(true);
  for (;;) {
    const Costs fit = Solved(left, right, active);
    if (std::all_of(fit.begin(), fit.end(), [](double cost) { return cost >= 0; })) return fit;
    for (size_t i = 0; i < kCosts; ++i) active[i] = active[i] && fit[i] > 0;
  }
}

int BitLength(int64_t number) {
  int bits = 0;
  for (; number > 0; number >>= 1) ++bits;
  return bits;
}

}  // namespace

Costs Load::Features() const {
  const auto number = [](int64_t count) { return static_cast<double>(count); };
  return {decode > 0 ? 1.0 : 0.0, number(decode),      prefill > 0 ? 1.0 : 0.0,
          number(prefill),        number(decode_keys), number(prefill_keys)};
}

double CostModel::Seconds(const Load& load) const { return Dot(costs_, load.Features()); }

int64_t CostModel::PromptRows(const Load& load, double step_s, int64_t depth, int64_t most) const {
  const double left = step_s / margin_ - Seconds(load) - (load.prefill ? 0.0 : costs_[2]);
  if (left <= 0) return std::min(kPage, most);
  // n rows cost n row + (n depth + n (n + 1) / 2) key.
  const double key = costs_[5], linear = costs_[3] + key * (static_cast<double>(depth) + 0.5);
  auto rows = static_cast<double>(most);
  if (key > 0) {
    rows = (std::sqrt(linear * linear + 2 * key * left) - linear) / key;
  } else if (linear > 0) {
    rows = left / linear;
  }
  const auto whole = static_cast<int64_t>(std::min(rows, static_cast<double>(most)));
  return std::min(most, std::max(kPage, whole / kPage * kPage));
}

int64_t CostModel::DecodeRowsFor(int64_t prefill) const {
  const double decode_s = costs_[1], prefill_s = costs_[3];
  const int64_t fits = decode_s > 0 ? static_cast<int64_t>(static_cast<double>(prefill) * prefill_s / decode_s) : prefill;
  return std::max<int64_t>(1, std::min(prefill, fits));
}

void CostModel::Observe(const Load& load, double seconds) {
  if (!learns_ || !(load.decode || load.prefill) || !(seconds > 0) || std::isinf(seconds)) return;
  const SizeClass size{BitLength(load.decode), BitLength(load.prefill), BitLength(load.decode_keys + load.prefill_keys)};
  auto& kept = measured_[size];
  if (kept.size() == kKept) kept.erase(kept.begin());
  kept.push_back({load.Features(), seconds});
  if (!load.prefill) {
    const double alone_s = seconds * Seconds({load.decode, 0, 0, 0}) / Seconds(load);
    ObserveDecode(load.decode, std::max(kMinS, alone_s));
  }
  ++count_;
  if (count_ % kCurvesEvery == 0) {
    curves_.expected.clear();
    may_draft_.clear();
  }
  if (count_ % kEvery == 0 || (count_ & (count_ - 1)) == 0) Fit();
}

// Of relative errors by least squares, so that a long time of one kind of step does not drown the others; a measurement far
// from the fit counts little (Cauchy's weights, Holland and Welsch 1977).
void CostModel::Fit() {
  std::vector<Measured> kept;
  for (const auto& [size, all] : measured_) kept.insert(kept.end(), all.begin(), all.end());
  std::vector<double> ratios;
  for (const Measured& one : kept) ratios.push_back(one.seconds / Dot(one.features, prior_));
  const double scale = Quantile(std::move(ratios), 0.5);
  // In units of the scaled prior, relative to what was measured: all columns have the same scale.
  std::vector<Costs> rows;
  for (const Measured& one : kept) {
    Costs& row = rows.emplace_back();
    for (size_t i = 0; i < kCosts; ++i) row[i] = one.features[i] * prior_[i] * scale / one.seconds;
  }
  std::vector<double> weights(kept.size(), 1);
  Costs fit{};
  for (int round = 0; round < kRounds; ++round) {
    fit = PositiveFit(rows, weights);
    for (size_t i = 0; i < rows.size(); ++i) weights[i] = 1 / (1 + std::pow((Dot(rows[i], fit) - 1) / kOutlier, 2));
  }
  for (size_t i = 0; i < kCosts; ++i) costs_[i] = fit[i] * prior_[i] * scale;
  std::vector<double> mixed;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (kept[i].features[0] > 0 && kept[i].features[2] > 0) mixed.push_back(1 / Dot(rows[i], fit));
  }
  if (mixed.size() >= kEnough) margin_ = std::clamp(Quantile(std::move(mixed), 1 - kLate), 1.0, kMostMargin);
}

}  // namespace mlcpipe::serving
