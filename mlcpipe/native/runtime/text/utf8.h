// UTF-8. No function reads past the end of a text, valid or not.
#ifndef MLCPIPE_RUNTIME_TEXT_UTF8_H_
#define MLCPIPE_RUNTIME_TEXT_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mlcpipe::utf8 {

constexpr uint32_t kMax = 0x10FFFF;

inline bool IsContinuation(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

inline bool IsScalar(uint32_t code) { return code <= kMax && (code < 0xD800 || code > 0xDFFF); }

// The code point at `at`, which moves behind it. Of bytes that are not UTF-8 it takes one.
inline uint32_t Next(std::string_view text, size_t* at) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data()) + *at;
  size_t left = text.size() - *at;
  uint32_t lead = bytes[0];
  if (lead >= 0xC2 && lead < 0xE0 && left > 1 && IsContinuation(bytes[1])) {
    *at += 2;
    return (lead & 31) << 6 | (bytes[1] & 63);
  }
  if (lead >= 0xE0 && lead < 0xF0 && left > 2 && IsContinuation(bytes[1]) && IsContinuation(bytes[2])) {
    uint32_t code = (lead & 15) << 12 | (bytes[1] & 63) << 6 | (bytes[2] & 63);
    if (code >= 0x800 && IsScalar(code)) {
      *at += 3;
      return code;
    }
  }
  if (lead >= 0xF0 && lead < 0xF5 && left > 3 && IsContinuation(bytes[1]) && IsContinuation(bytes[2]) &&
      IsContinuation(bytes[3])) {
    uint32_t code = (lead & 7) << 18 | (bytes[1] & 63) << 12 | (bytes[2] & 63) << 6 | (bytes[3] & 63);
    if (code >= 0x10000 && code <= kMax) {
      *at += 4;
      return code;
    }
  }
  ++*at;
  return lead;
}

// Where the code point before `at` begins; `at` is not 0.
inline size_t Before(std::string_view text, size_t at) {
  do --at;
  while (at > 0 && IsContinuation(text[at]));
  return at;
}

inline void Append(std::string* text, uint32_t code) {
  if (code < 0x80) {
    *text += static_cast<char>(code);
  } else if (code < 0x800) {
    *text += {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
  } else if (code < 0x10000) {
    *text += {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)),
              static_cast<char>(0x80 | (code & 63))};
  } else {
    *text += {static_cast<char>(0xF0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 63)),
              static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
  }
}

// Where the first byte is that is not UTF-8, or the size.
inline size_t ValidPrefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    size_t begin = at;
    if (Next(text, &at) > 0x7F && at == begin + 1) return begin;
  }
  return at;
}

}  // namespace mlcpipe::utf8

#endif  // MLCPIPE_RUNTIME_TEXT_UTF8_H_
