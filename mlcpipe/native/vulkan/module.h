// A runtime module of kind "vulkan": kernels that TVM's host code calls.
#ifndef MLCPIPE_VULKAN_MODULE_H_
#define MLCPIPE_VULKAN_MODULE_H_

#include <tvm/ffi/extra/module.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "kernel.h"

namespace mlcpipe::vulkan {

// A kernel and its pipeline on each device, created at the first call there.
class Program {
 public:
  explicit Program(Kernel kernel);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const Kernel& kernel() const { return kernel_; }
  // Raises if the device cannot run the kernel.
  Pipeline* For(int index, Device* device);
  // Destroys the pipeline; the next call creates another. No call may run meanwhile.
  void Release(int index) noexcept;
  // The arguments of a call: buffers and scalars by position, then the extents of `launch`.
  void Call(tvm::ffi::PackedArgs arguments);

 private:
  // Each of these raises with the kernel's name.
  void CheckDevice(const Device& device) const;
  void ReadBuffers(const TVMFFIAny* arguments, Device* device, Buffer** buffers) const;
  void ReadScalars(const TVMFFIAny* arguments, char* push) const;
  // False if the grid is empty.
  bool ReadExtents(const TVMFFIAny* extents, const VkPhysicalDeviceLimits& limits, uint32_t* groups) const;
  [[noreturn]] void Refuse(const std::string& what) const;

  const Kernel kernel_;
  std::vector<uint8_t> writes_;
  std::mutex mutex_;
  std::vector<std::atomic<Pipeline*>> pipelines_;  // by index of the device
  std::vector<Pipeline*> outdated_;                // for lost devices; calls may still hold them
};

class VulkanModule final : public tvm::ffi::ModuleObj {
 public:
  explicit VulkanModule(const tvm::ffi::Bytes& bytes);
  // Also frees what devices keep for its functions.
  ~VulkanModule();

  const char* kind() const final { return "vulkan"; }
  int GetPropertyMask() const final;
  tvm::ffi::Bytes SaveToBytes() const final;
  tvm::ffi::String InspectSource(const tvm::ffi::String& format) const final;
  tvm::ffi::Optional<tvm::ffi::Function> GetFunction(const tvm::ffi::String& name) final;

  // Adds a user on a device and creates the pipelines of all kernels with several threads. Raises the first error.
  void Prepare(int index, int threads);
  // Removes a user. The last one also frees the pipelines and memory that the device kept.
  void Release(int index);

 private:
  std::vector<uint64_t> bytes_;  // aligned for the code in it
  size_t size_;
  std::unordered_map<std::string, std::unique_ptr<Program>> programs_;
  std::mutex mutex_;
  std::vector<int> users_;  // by index of the device
};

// The device of this thread's calls; TVM's host code sets it before each call.
int& CurrentDevice();

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_MODULE_H_
