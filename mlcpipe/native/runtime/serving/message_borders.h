// Where a prompt is cut so that states in slots are kept there: mlcpipe/runtime/serving/message_borders.py.
#ifndef MLCPIPE_RUNTIME_SERVING_MESSAGE_BORDERS_H_
#define MLCPIPE_RUNTIME_SERVING_MESSAGE_BORDERS_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace mlcpipe::serving {

constexpr int64_t kCheckpointTokens = 64;  // between checkpoints that stay: what computing again must cost to be worth a slot

// The ends of pages before control tokens, in order, for a prompt of `length` tokens with such at `places`.
std::vector<int64_t> PageBorders(int64_t length, std::vector<int64_t> places);

// Where a forward of a prompt's tokens from `begin` to `end` ends instead of `end`, if it keeps this share of its tokens.
std::optional<int64_t> BorderBetween(const std::vector<int64_t>& borders, int64_t begin, int64_t end, double least = 0);

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_MESSAGE_BORDERS_H_
