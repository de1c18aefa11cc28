#include "serving/drafting.h"

#include <algorithm>

namespace mlcpipe::serving {
namespace {

constexpr size_t kLeastMatch = 2;   // a single token in common says little
constexpr int kCandidates = 32;     // places with the last two tokens that are compared, the latest ones
constexpr double kStep = 0.2;       // how far one token, right or wrong, moves a rate
constexpr double kLittle = 0.01;    // of a step
constexpr int64_t kFirstLooks = 64;  // before they can be said not to pay
constexpr int64_t kSeldom = 16;      // steps, one of which looks even where that does not pay
constexpr double kStepOfSearch = 0.03;  // how far one step moves the estimates of what looking costs and saves
constexpr uint32_t kNoToken = 0xFFFFFFFF;

uint64_t PairOf(uint32_t before, int32_t token) { return uint64_t{before} << 32 | static_cast<uint32_t>(token); }

}  // namespace

bool Search::Pays() {
  if (looks_ < kFirstLooks || spent_ <= std::max(saved_, kLittle * steps_)) return true;
  passed_ = (passed_ + 1) % kSeldom;
  return !passed_;
}

void Search::Learn(double spent, double saved, double step) {
  ++looks_;
  spent_ += kStepOfSearch * (spent - spent_);
  saved_ += kStepOfSearch * (saved - saved_);
  steps_ += kStepOfSearch * (step - steps_);
}

Draft Lookup::Propose(const std::vector<int32_t>& tokens) {
  const int32_t *const came = tokens.data() + text_.size(), *const end = tokens.data() + tokens.size();
  Learn(came, end);
  Extend(came, end);
  const auto [match, at] = Find();
  match_ = match;
  guess_.clear();
  for (size_t next = at; match && next < text_.size() && next < at + kMostDrafted; ++next) {
    if (stops_.count(text_[next])) break;
    guess_.push_back(text_[next]);
  }
  return {guess_, rates_[match]};
}

// Compares the tokens since the last proposal with it.
void Lookup::Learn(const int32_t* begin, const int32_t* end) {
  for (size_t at = 0; at < guess_.size() && begin + at < end; ++at) {
    const bool right = guess_[at] == begin[at];
    rates_[match_] += kStep * ((right ? 1 : 0) - rates_[match_]);
    if (!right) break;
  }
}

void Lookup::Extend(const int32_t* begin, const int32_t* end) {
  for (; begin != end; ++begin) {
    const uint64_t pair = PairOf(text_.empty() ? kNoToken : static_cast<uint32_t>(text_.back()), *begin);
    text_.push_back(*begin);
    size_t& latest = latest_[pair];
    earlier_.push_back(latest);
    latest = text_.size();
  }
}

// The longest match of the last tokens, the latest of several: its length, and where it ends.
std::pair<size_t, size_t> Lookup::Find() const {
  std::pair<size_t, size_t> best{0, 0};
  const size_t size = text_.size(), most = std::min(kMostMatch, size);
  if (most < kLeastMatch) return best;
  size_t at = earlier_[latest_.at(PairOf(static_cast<uint32_t>(text_[size - 2]), text_[size - 1]))];
  for (int candidate = 0; candidate < kCandidates && at; ++candidate, at = earlier_[at]) {
    size_t match = kLeastMatch;
    while (match < most && match < at && text_[at - match - 1] == text_[size - match - 1]) ++match;
    if (match > best.first) best = {match, at};
    if (match == kMostMatch) break;
  }
  return best;
}

}  // namespace mlcpipe::serving
