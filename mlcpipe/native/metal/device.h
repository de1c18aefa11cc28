// The GPU with a table of its memory: every address that TVM gives is checked.
#ifndef MLCPIPE_METAL_DEVICE_H_
#define MLCPIPE_METAL_DEVICE_H_

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "gpu.h"

namespace mlcpipe::metal {

// From any thread; commands run in the order of the calls. What fails throws tvm::ffi::Error in words.
class Device {
 public:
  // Throws where there is no GPU.
  static Device& Get();
  // Null where there is no GPU.
  static Device* Find();

  explicit Device(std::unique_ptr<Gpu> gpu) : gpu_(std::move(gpu)) {}

  const GpuInfo& info() const { return gpu_->info(); }
  uint64_t free_bytes();

  // A name of new memory for TVM, no address. Its contents are undefined.
  void* Allocate(size_t bytes);
  void Free(void* data);
  void Upload(const void* from, void* to, size_t offset, size_t bytes);
  void Download(const void* from, size_t offset, void* to, size_t bytes);
  void Copy(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes);

  Pipeline Compile(const std::string& kernel, const std::string& source);
  void Release(void* pipeline);
  // The buffers of `launch` are names from `Allocate`.
  void Dispatch(const std::string& kernel, const Launch& launch);

  // Waits for all commands.
  void Synchronize();

  // The system ends an app whose commands run in the background: commands are refused from now on, and those before have
  // ended when this returns; or they are allowed again.
  void SetBackground(bool background);

 private:
  struct Allocation {
    char* contents;
    size_t bytes;
  };

  // Each with the lock held.
  Allocation& Find(const void* data, size_t offset, size_t bytes);
  void Wait();
  void BeginCommand();

  std::unique_ptr<Gpu> gpu_;
  std::mutex mutex_;
  std::unordered_map<const void*, Allocation> allocations_;
  int commands_ = 0;  // not waited for yet
  bool background_ = false;
};

}  // namespace mlcpipe::metal

#endif  // MLCPIPE_METAL_DEVICE_H_
