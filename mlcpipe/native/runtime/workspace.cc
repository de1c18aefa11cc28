#include "workspace.h"

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/runtime/c_backend_api.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <set>
#include <vector>

namespace mlcpipe {
namespace {

class Workspaces;

// Of all threads that have any. Never destroyed, as threads may end after the program's variables.
struct Threads {
  std::mutex mutex;
  std::set<Workspaces*> all;

  static Threads& Global() {
    static auto* const threads = new Threads();
    return *threads;
  }
};

class Workspaces {
 public:
  static Workspaces& OfThread() {
    static thread_local Workspaces workspaces;
    return workspaces;
  }
  Workspaces() {
    const std::lock_guard<std::mutex> lock(Threads::Global().mutex);
    Threads::Global().all.insert(this);
  }
  ~Workspaces() {
    const std::lock_guard<std::mutex> lock(Threads::Global().mutex);
    Threads::Global().all.erase(this);
    for (const Block& block : blocks_) std::free(block.data);
  }

  // The smallest free block that is large enough, else a new one in place of the largest. Null without memory.
  void* Take(uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block *best = nullptr, *unused = nullptr;
    for (Block& block : blocks_) {
      if (block.taken) continue;
      if (!unused || block.bytes > unused->bytes) unused = &block;
      if (block.bytes >= bytes && (!best || block.bytes < best->bytes)) best = &block;
    }
    if (!best) {
      best = unused ? unused : &blocks_.emplace_back();
      std::free(best->data);
      *best = {};
      const uint64_t rounded = (bytes + kPageBytes) / kPageBytes * kPageBytes;
      if (rounded < bytes || posix_memalign(&best->data, kAlignment, rounded) != 0) return best->data = nullptr;
      best->bytes = rounded;
    }
    best->taken = true;
    return best->data;
  }

  void Free(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Block& block : blocks_) {
      if (block.data == data) block.taken = false;
    }
  }

  void FreeAll() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Block& block : blocks_) block.taken = false;
  }

  void Trim() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Block& block : blocks_) {
      if (block.taken) continue;
      std::free(block.data);
      block = {};
    }
  }

 private:
  struct Block {
    void* data = nullptr;
    uint64_t bytes = 0;
    bool taken = false;
  };
  static constexpr uint64_t kPageBytes = 4096, kAlignment = 64;

  std::mutex mutex_;  // of the blocks, for Trim
  std::vector<Block> blocks_;
};

// tvm/runtime/c_backend_api.h
void* AllocWorkspace(int type, int index, uint64_t bytes, int code, int bits) {
  if (type != kDLCPU) return TVMBackendAllocWorkspace(type, index, bytes, code, bits);
  return Workspaces::OfThread().Take(bytes);
}

int FreeWorkspace(int type, int index, void* data) {
  if (type != kDLCPU) return TVMBackendFreeWorkspace(type, index, data);
  Workspaces::OfThread().Free(data);
  return 0;
}

void Register() {
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendAllocWorkspace", reinterpret_cast<void*>(AllocWorkspace));
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendFreeWorkspace", reinterpret_cast<void*>(FreeWorkspace));
}

}  // namespace

void UseOwnWorkspaces() {
  static const bool once = (Register(), true);
  (void)once;
}

void ReclaimWorkspaces() { Workspaces::OfThread().FreeAll(); }

void TrimWorkspaces() {
  const std::lock_guard<std::mutex> lock(Threads::Global().mutex);
  for (Workspaces* workspaces : Threads::Global().all) workspaces->Trim();
}

}  // namespace mlcpipe
