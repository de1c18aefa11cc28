#include "device.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstring>

namespace mlcpipe::metal {
namespace {

constexpr int kSubmitted = 64;  // commands at a time, so that the GPU begins while the CPU continues; not measured

}  // namespace

Device* Device::Find() {
  static auto* device = [] {  // tensors may be freed after static objects
    std::unique_ptr<Gpu> gpu = OpenGpu();
    return gpu ? new Device(std::move(gpu)) : nullptr;
  }();
  return device;
}

Device& Device::Get() {
  Device* device = Find();
  if (!device) TVM_FFI_THROW(RuntimeError) << "metal: this machine has no GPU for Metal";
  return *device;
}

uint64_t Device::free_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return gpu_->free_bytes();
}

void* Device::Allocate(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t size = std::max<size_t>(bytes, 1);  // Metal has no empty buffers
  const Memory memory = size <= info().max_buffer_bytes ? gpu_->Allocate(size) : Memory();
  if (!memory.buffer) {
    TVM_FFI_THROW(MemoryError) << "metal: no memory for a buffer of " << bytes << " bytes on " << info().name << ", where "
                               << gpu_->free_bytes() << " bytes are free and a buffer has at most "
                               << info().max_buffer_bytes;
  }
  allocations_[memory.buffer] = {memory.contents, size};
  return memory.buffer;
}

void Device::Free(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  Find(data, 0, 0);
  allocations_.erase(data);
  gpu_->Release(data);
}

Device::Allocation& Device::Find(const void* data, size_t offset, size_t bytes) {
  auto found = allocations_.find(data);
  if (found == allocations_.end()) TVM_FFI_THROW(RuntimeError) << "metal: no buffer of " << info().name;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) {
    TVM_FFI_THROW(RuntimeError) << "metal: " << bytes << " bytes from " << offset << " on are beyond a buffer of "
                                << found->second.bytes;
  }
  return found->second;
}

void Device::Upload(const void* from, void* to, size_t offset, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  char* contents = Find(to, offset, bytes).contents;
  Wait();  // commands may read what is there
  std::memcpy(contents + offset, from, bytes);
}

void Device::Download(const void* from, size_t offset, void* to, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const char* contents = Find(from, offset, bytes).contents;
  Wait();
  std::memcpy(to, contents + offset, bytes);
}

void Device::Copy(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Find(from, from_offset, bytes);
  Find(to, to_offset, bytes);
  BeginCommand();
  gpu_->Copy(const_cast<void*>(from), from_offset, to, to_offset, bytes);
}

Pipeline Device::Compile(const std::string& kernel, const std::string& source) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string problem;
  const Pipeline pipeline = gpu_->Compile(kernel, source, &problem);
  if (!pipeline.state) {
    TVM_FFI_THROW(RuntimeError) << "metal: Metal cannot compile kernel " << kernel << " for " << info().name << ": " << problem;
  }
  return pipeline;
}

void Device::Release(void* pipeline) {
  std::lock_guard<std::mutex> lock(mutex_);
  gpu_->Release(pipeline);
}

void Device::Dispatch(const std::string& kernel, const Launch& launch) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < launch.buffers.size(); ++i) {
    if (allocations_.count(launch.buffers[i])) continue;
    TVM_FFI_THROW(RuntimeError) << "metal: kernel " << kernel << " got no buffer of " << info().name << " as argument " << i;
  }
  BeginCommand();
  gpu_->Dispatch(launch);
}

void Device::BeginCommand() {
  if (background_) TVM_FFI_THROW(RuntimeError) << "metal: an app in the background may not use Metal: use it when it is back";
  if (++commands_ % kSubmitted == 0) gpu_->Submit();
}

void Device::Synchronize() {
  std::lock_guard<std::mutex> lock(mutex_);
  Wait();
}

void Device::Wait() {
  if (!commands_) return;
  commands_ = 0;
  const std::string problem = gpu_->Wait();
  if (!problem.empty()) TVM_FFI_THROW(RuntimeError) << "metal: the GPU " << info().name << " failed: " << problem;
}

void Device::SetBackground(bool background) {
  std::lock_guard<std::mutex> lock(mutex_);
  background_ = background;
  Wait();
}

}  // namespace mlcpipe::metal
