// Source: SPIR-V specification, 2.3 "Physical Layout of a SPIR-V Module", OpEntryPoint.
#include <cstring>

#include "kernel.h"

namespace mlcpipe::vulkan {
namespace {

constexpr uint32_t kMagic = 0x07230203, kMaxVersion = 0x00010600, kMaxIds = 1u << 22;
constexpr uint32_t kOpEntryPoint = 15, kGLCompute = 5;
constexpr size_t kHeaderWords = 5;

// Whether the words are a literal string, zero-terminated inside them, that equals `expected`.
bool IsString(const uint32_t* words, size_t count, const std::string& expected) {
  const char* text = reinterpret_cast<const char*>(words);
  return expected.size() < count * 4 && std::memcmp(text, expected.c_str(), expected.size() + 1) == 0;
}

}  // namespace

std::string FindSpirvProblem(const uint32_t* words, size_t count, const std::string& entry) {
  if (count < kHeaderWords) return "its code is too short";
  if (words[0] != kMagic) return "its code is not SPIR-V";
  if (words[1] > kMaxVersion || (words[1] & 0xff0000ff) != 0) return "its SPIR-V has an unknown version";
  if (words[3] == 0 || words[3] > kMaxIds) return "its SPIR-V has an impossible number of ids";
  bool found = false;
  for (size_t at = kHeaderWords; at < count;) {
    const uint32_t operation = words[at] & 0xffff, length = words[at] >> 16;
    if (length == 0 || length > count - at) return "its SPIR-V is torn";
    if (operation == kOpEntryPoint && length >= 4 && words[at + 1] == kGLCompute) {
      found = found || IsString(words + at + 3, length - 3, entry);
    }
    at += length;
  }
  return found ? "" : "its SPIR-V has no compute entry point " + entry;
}

}  // namespace mlcpipe::vulkan
