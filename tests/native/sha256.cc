// What tests of sha256.cc call: the hash as the runtime computes it, and by plain C++.
#include "bundle/sha256.cc"

extern "C" void hash(const char* data, size_t bytes, char* hexadecimal) {
  std::memcpy(hexadecimal, mlcpipe::Sha256({data, bytes}).data(), 64);
}

// Whether both kinds of code change a state in the same way; 1 too where the CPU has no instructions for it.
extern "C" int same(const uint8_t* data, size_t blocks) {
  uint32_t one[8] = {1, 2, 3, 4, 5, 6, 7, 0xffffffff}, other[8];
  std::memcpy(other, one, sizeof one);
  mlcpipe::AddBlocks(one, data, blocks);
  (mlcpipe::HasInstructions() ? mlcpipe::AddBlocksFast : mlcpipe::AddBlocks)(other, data, blocks);
  return std::memcmp(one, other, sizeof one) == 0;
}
