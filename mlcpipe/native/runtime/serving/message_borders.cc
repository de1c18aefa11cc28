#include "serving/message_borders.h"

#include <algorithm>
#include <utility>

#include "page.h"

namespace mlcpipe::serving {
namespace {

constexpr int64_t kApart = 4;      // tokens from one control token of a border to the next
constexpr int64_t kMostTail = 32;  // tokens with which an answer begins

}  // namespace

std::vector<int64_t> PageBorders(int64_t length, std::vector<int64_t> places) {
  for (size_t last = places.size(); last-- > 1;) {  // what begins the answer is one border
    if (places[last] - places[last - 1] > kApart || length - places[last - 1] > kMostTail) break;
    places.pop_back();
  }
  for (int64_t& place : places) place = place / kPage * kPage;
  places.erase(std::unique(places.begin(), places.end()), places.end());
  places.erase(places.begin(), std::lower_bound(places.begin(), places.end(), kCheckpointTokens));
  return places;
}

std::optional<int64_t> BorderBetween(const std::vector<int64_t>& borders, int64_t begin, int64_t end, double least) {
  const auto first = std::lower_bound(borders.begin(), borders.end(), begin + kCheckpointTokens);
  const auto after = std::lower_bound(first, borders.end(), end);
  if (first == after) return std::nullopt;
  if (first == borders.begin()) return *first;
  const int64_t last = *(after - 1);
  return static_cast<double>(last - begin) >= least * static_cast<double>(end - begin) ? std::optional(last) : std::nullopt;
}

}  // namespace mlcpipe::serving
