// Pages of 16 tokens (tir_schedules/step_layout.py).
#ifndef MLCPIPE_RUNTIME_PAGE_H_
#define MLCPIPE_RUNTIME_PAGE_H_

#include <algorithm>
#include <cstdint>

namespace mlcpipe {

constexpr int64_t kPage = 16;     // tokens
constexpr int32_t kNoUnit = -1;  // in the place of a page's or a slot's number

constexpr int64_t PagesOf(int64_t tokens) { return (tokens + kPage - 1) / kPage; }

// The first page that a query at this position, or a later one, needs where it sees `window` tokens, itself included; 0: all.
// The last full page is needed in any case.
constexpr int64_t FirstPage(int64_t window, int64_t position) {
  return window ? std::max<int64_t>(0, position + 1 - std::max(window, 2 * kPage)) / kPage : 0;
}

// Pages that a sequence of so many tokens needs at once there, computed in chunks of so many rows.
constexpr int64_t PagesAtOnce(int64_t window, int64_t tokens, int64_t chunk) {
  return window ? std::min(PagesOf(tokens), PagesOf(window + chunk) + 2) : PagesOf(tokens);
}

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_PAGE_H_
