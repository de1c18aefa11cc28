#include <sys/mman.h>
#include <unistd.h>

#include "host.h"

namespace mlcpipe {
namespace {

#if defined(__APPLE__)  // where MADV_DONTNEED keeps the memory
constexpr int kFree = MADV_FREE;
#else
constexpr int kFree = MADV_DONTNEED;
#endif

}  // namespace

void Discard(void* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, kFree);
}

std::string SizeWords(int64_t bytes) { return std::to_string((bytes + (1 << 19)) >> 20) + " MiB"; }

}  // namespace mlcpipe
