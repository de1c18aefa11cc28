#include "serving/drafting.h"

#include <algorithm>
#include <utility>

namespace mlcpipe::serving {
namespace {

constexpr size_t kFirstPlaces = 64;  // a power of two
constexpr size_t kLeastMatch = 2;    // a single token in common says little
constexpr int kCandidates = 32;      // places with the last two tokens that are compared, the latest ones
constexpr double kStep = 0.2;        // how far one token, right or wrong, moves a rate
constexpr double kLittle = 0.01;     // of a step
constexpr int64_t kFirstLooks = 64;  // before they can be said not to pay
constexpr int64_t kSeldom = 16;      // steps, one of which looks even where that does not pay
constexpr double kStepOfHead = 0.1;     // how far one draft moves the rate that new answers start with
constexpr double kPriorTokens = 8;      // of an answer, that weigh as much as the rate that it started with
constexpr double kLeastStep = 0.05;     // how far one token moves an answer's rate later on
constexpr double kStepOfSearch = 0.03;  // how far one step moves the estimates of what looking costs and saves

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

void HeadDraft::Hold(const FewTokens& tokens, int64_t length) {
  tokens_ = tokens;
  length_ = length;
}

Draft HeadDraft::Choose(const Draft& found, int64_t length) {
  chosen_ = length_ == length && !tokens_.empty() && (found.tokens.empty() || found.rate <= rate_);
  return chosen_ ? Draft{tokens_, rate_} : found;
}

void HeadDraft::Checked(int64_t drafted, int64_t right) {
  if (!chosen_) return;
  const int64_t checked = right + (right < drafted ? 1 : 0);
  for (int64_t at = 0; at < checked; ++at) {
    ++checked_;
    rate_ += std::max(kLeastStep, 1 / (kPriorTokens + static_cast<double>(checked_))) * ((at < right ? 1 : 0) - rate_);
  }
  *common_ += kStepOfHead * (static_cast<double>(right) / static_cast<double>(checked) - *common_);
}

Lookup::Lookup(const std::set<int32_t>& stops) : stops_(stops), latest_(kFirstPlaces), earlier_(1) {
  rates_.fill(kFirstRate);
}

// Twice as many places.
void Lookup::Grow() {
  const std::vector<uint32_t> ends = std::exchange(latest_, std::vector<uint32_t>(2 * latest_.size()));
  for (const uint32_t end : ends) {
    if (end) LatestOf(text_[end - 2], text_[end - 1]) = end;
  }
}

// The place of a pair, which is free where it has not occurred. A pair ends at the number of tokens up to it.
uint32_t& Lookup::LatestOf(int32_t before, int32_t token) {
  const uint64_t pair = uint64_t{static_cast<uint32_t>(before)} << 32 | static_cast<uint32_t>(token);
  const uint64_t mixed = pair * 0x9E3779B97F4A7C15ULL;
  for (size_t at = static_cast<size_t>(mixed >> 32);; ++at) {
    uint32_t& place = latest_[at & (latest_.size() - 1)];
    if (!place || (text_[place - 2] == before && text_[place - 1] == token)) return place;
  }
}

Draft Lookup::Propose(const std::vector<int32_t>& tokens) {
  const int32_t *const came = tokens.data() + text_.size(), *const end = tokens.data() + tokens.size();
  Learn(came, end);
  Extend(came, end);
  const auto [match, at] = Find();
  match_ = match;
  guess_ = {};
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
    text_.push_back(*begin);
    if (2 * text_.size() > latest_.size()) Grow();
    if (text_.size() == 1) {
      earlier_.push_back(0);
      continue;
    }
    uint32_t& latest = LatestOf(text_[text_.size() - 2], *begin);
    earlier_.push_back(latest);
    latest = static_cast<uint32_t>(text_.size());
  }
}

// The longest match of the last tokens, the latest of several: its length, and where it ends.
std::pair<size_t, size_t> Lookup::Find() const {
  std::pair<size_t, size_t> best{0, 0};
  const size_t size = text_.size(), most = std::min(kMostMatch, size);
  if (most < kLeastMatch) return best;
  size_t at = earlier_[size];
  for (int candidate = 0; candidate < kCandidates && at; ++candidate, at = earlier_[at]) {
    size_t match = kLeastMatch;
    while (match < most && match < at && text_[at - match - 1] == text_[size - match - 1]) ++match;
    if (match > best.first) best = {match, at};
    if (match == kMostMatch) break;
  }
  return best;
}

}  // namespace mlcpipe::serving
