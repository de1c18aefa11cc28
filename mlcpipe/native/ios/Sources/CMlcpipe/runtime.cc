#ifndef NDEBUG
#define NDEBUG
#endif
@DEFINITIONS@

#include "runtime/runtime.cc"

#include "mlcpipe_sha256.h"

void mlcpipe_sha256(const void* data, size_t bytes, char digits[65]) {
  const std::string found = mlcpipe::Sha256({static_cast<const char*>(data), bytes});
  std::memcpy(digits, found.c_str(), found.size() + 1);
}
