// Random numbers of a seed and a position alone (mlcpipe/runtime/random_numbers.py).
#ifndef MLCPIPE_RUNTIME_RANDOM_H_
#define MLCPIPE_RUNTIME_RANDOM_H_

#include <cstdint>

namespace mlcpipe {

// The number in [0, 1) with 24 bits that a token at a position is drawn with: Philox4x32-10 (Salmon et al. 2011).
inline float Uniform(uint64_t seed, uint64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(second);
    counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return static_cast<float>(counter[0] >> 8) * 0x1p-24f;
}

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_RANDOM_H_
