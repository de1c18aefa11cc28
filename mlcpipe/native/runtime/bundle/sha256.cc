// FIPS 180-4, "Secure Hash Standard"; with the instructions for it where the CPU has them.
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

#include "files.h"

namespace mlcpipe {
namespace {

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t Rotated(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

void AddBlock(uint32_t state[8], const uint8_t* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
           block[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (Rotated(a, 7) ^ Rotated(a, 18) ^ a >> 3) + w[i - 7] + (Rotated(b, 17) ^ Rotated(b, 19) ^ b >> 10);
  }
  uint32_t s[8];
  std::memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; ++i) {
    const uint32_t e = s[4], a = s[0];
    const uint32_t first = s[7] + (Rotated(e, 6) ^ Rotated(e, 11) ^ Rotated(e, 25)) + ((e & s[5]) ^ (~e & s[6])) +
                           kRounds[i] + w[i];
    const uint32_t second =
        (Rotated(a, 2) ^ Rotated(a, 13) ^ Rotated(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
    std::memmove(s + 1, s, 7 * sizeof *s);
    s[4] += first;
    s[0] = first + second;
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

void AddBlocks(uint32_t state[8], const uint8_t* data, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i) AddBlock(state, data + 64 * i);
}

// Four rounds at a time; of the 64 words of a block the last 16 are kept.
#if defined(__x86_64__)
bool HasInstructions() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 19 & 1) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

__m128i Load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

__attribute__((target("sha,sse4.1"))) void AddBlocksFast(uint32_t state[8], const uint8_t* data, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i badc = _mm_shuffle_epi32(Load(state), 0xb1), hgfe = _mm_shuffle_epi32(Load(state + 4), 0x1b);
  __m128i first = _mm_alignr_epi8(badc, hgfe, 8), second = _mm_blend_epi16(hgfe, badc, 0xf0);
  for (; blocks; --blocks, data += 64) {
    const __m128i first_before = first, second_before = second;
    __m128i w[4];
    for (int i = 0; i < 16; ++i) {
      __m128i& x = w[i & 3];
      if (i < 4) {
        x = _mm_shuffle_epi8(Load(data + 16 * i), swap);
      } else {
        const __m128i before = w[(i + 3) & 3], shifted = _mm_alignr_epi8(before, w[(i + 2) & 3], 4);
        x = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(x, w[(i + 1) & 3]), shifted), before);
      }
      const __m128i sum = _mm_add_epi32(x, Load(kRounds + 4 * i));
      second = _mm_sha256rnds2_epu32(second, first, sum);
      first = _mm_sha256rnds2_epu32(first, second, _mm_shuffle_epi32(sum, 0x0e));
    }
    first = _mm_add_epi32(first, first_before);
    second = _mm_add_epi32(second, second_before);
  }
  const __m128i abef = _mm_shuffle_epi32(first, 0x1b), dchg = _mm_shuffle_epi32(second, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(abef, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, abef, 8));
}
#elif defined(__aarch64__)
bool HasInstructions() {
#if defined(__APPLE__)
  return true;  // all of Apple's have them
#else
  constexpr unsigned long kHwcapSha2 = 1 << 6;  // asm/hwcap.h of Linux
  return getauxval(AT_HWCAP) & kHwcapSha2;
#endif
}

#if defined(__clang__)
__attribute__((target("sha2")))
#else
__attribute__((target("+crypto")))
#endif
void AddBlocksFast(uint32_t state[8], const uint8_t* data, size_t blocks) {
  uint32x4_t first = vld1q_u32(state), second = vld1q_u32(state + 4);
  for (; blocks; --blocks, data += 64) {
    const uint32x4_t first_before = first, second_before = second;
    uint32x4_t w[4];
    for (int i = 0; i < 16; ++i) {
      uint32x4_t& x = w[i & 3];
      x = i < 4 ? vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)))
                : vsha256su1q_u32(vsha256su0q_u32(x, w[(i + 1) & 3]), w[(i + 2) & 3], w[(i + 3) & 3]);
      const uint32x4_t sum = vaddq_u32(x, vld1q_u32(kRounds + 4 * i)), before = first;
      first = vsha256hq_u32(first, second, sum);
      second = vsha256h2q_u32(second, before, sum);
    }
    first = vaddq_u32(first, first_before);
    second = vaddq_u32(second, second_before);
  }
  vst1q_u32(state, first);
  vst1q_u32(state + 4, second);
}
#else
bool HasInstructions() { return false; }
void AddBlocksFast(uint32_t*, const uint8_t*, size_t) {}
#endif

}  // namespace

std::string Sha256(std::string_view data) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* bytes = reinterpret_cast<const uint8_t*>(data.data());
  static const auto add = HasInstructions() ? AddBlocksFast : AddBlocks;
  const size_t at = data.size() & ~size_t{63};
  add(state, bytes, at / 64);
  uint8_t tail[128] = {};
  const size_t left = data.size() - at, size = left < 56 ? 64 : 128;
  if (left) std::memcpy(tail, bytes + at, left);
  tail[left] = 0x80;
  for (int i = 0; i < 8; ++i) tail[size - 1 - i] = static_cast<uint8_t>(uint64_t{data.size()} * 8 >> 8 * i);
  add(state, tail, size / 64);
  std::string text;
  for (uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  }
  return text;
}

}  // namespace mlcpipe
