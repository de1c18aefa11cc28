#include "states.h"

#include <cstring>
#include <functional>
#include <set>

#include "files.h"

namespace mlcpipe {

State::Units State::NeededAfter(int64_t tokens) const {
  if (!paged) return {0, 1};
  const int64_t first = FirstPage(window, tokens);
  return {first, PagesOf(tokens) - first};
}

void State::ClearUnused(int64_t tokens, uint8_t* unit) const {
  const auto used = static_cast<size_t>(tokens % kPage);
  if (!paged || !used) return;
  for (int64_t copy = 0; copy < copies; ++copy) {
    for (const StatePart& part : parts) {
      auto bytes = static_cast<size_t>(part.bytes);  // of a token, on the axes behind that of tokens
      for (size_t axis = 0; axis <= static_cast<size_t>(part.token_axis); ++axis) {
        bytes /= static_cast<size_t>(part.shape[axis]);
      }
      uint8_t* const end = unit + part.bytes;
      for (; unit < end; unit += kPage * bytes) std::memset(unit + used * bytes, 0, (kPage - used) * bytes);
    }
  }
}

StateTable::StateTable(std::vector<State> states) : all_(std::move(states)) {
  const auto sees = [](int64_t window) { return window ? window : INT64_MAX; };
  std::set<int64_t, std::greater<>> seen;
  for (const State& state : all_) {
    (state.paged ? page_bytes_ : slot_bytes_) += state.unit_bytes;
    if (state.paged) seen.insert(sees(state.window));
  }
  if (seen.empty()) seen.insert(sees(0));
  for (const int64_t most : seen) windows_.push_back(most == sees(0) ? 0 : most);
  for (State& state : all_) {
    while (state.paged && windows_[state.group] != state.window) ++state.group;
  }
}

int64_t StateTable::BytesAfter(int64_t tokens) const {
  int64_t bytes = 0;
  for (const State& state : all_) bytes += tokens ? state.NeededAfter(tokens).count * state.unit_bytes : 0;
  return bytes;
}

std::string StateTable::Hash() const {
  std::string lines;
  for (const State& state : all_) {
    lines += state.name + (state.paged ? " pages " : " slot ") + std::to_string(state.window) + " " + state.dtype + " " +
             std::to_string(state.copies);
    for (const StatePart& part : state.parts) {
      std::string shape;
      for (const int64_t extent : part.shape) shape += (shape.empty() ? "" : "x") + std::to_string(extent);
      lines += " " + part.name + ":" + part.dtype + ":" + shape + ":" +
               (part.token_axis == kNoUnit ? "-" : std::to_string(part.token_axis));
    }
    lines += "\n";
  }
  return Sha256(lines);
}

}  // namespace mlcpipe
