// Where a model's weights, pages and activations lie: the host, or a device with memory of its own
// (mlcpipe/devices/base.py).
#ifndef MLCPIPE_RUNTIME_DEVICE_H_
#define MLCPIPE_RUNTIME_DEVICE_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/runtime/tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "error.h"
#include "host.h"

namespace mlcpipe {

class Gpu;

struct Device {
  DLDevice handle{kDLCPU, 0};
  const Gpu* gpu = nullptr;           // its kind, null for the host
  std::string kind = "cpu", title;    // the title is for errors, "" for the host
  std::string driver;                 // what its results depend on: device, driver and their versions
  int64_t max_tensor_bytes = INT64_MAX;
  bool unified_memory = true;         // it uses the host's

  bool on_host() const { return !gpu; }

  // Memory for weights and KV cache that nothing uses now.
  FreeMemory Free() const;

  // Its numbers are anything.
  tvm::runtime::Tensor Empty(tvm::ffi::Shape shape, DLDataType dtype) const;

  // A tensor of the device with the numbers of one of the host, which has read them; on the host that one.
  tvm::runtime::Tensor Put(const tvm::runtime::Tensor& host) const;

  // A copy of weights, or on the host themselves. Throws kResource for a tensor that is too large.
  tvm::ffi::Array<tvm::runtime::Tensor> PutAll(const tvm::ffi::Array<tvm::runtime::Tensor>& host) const;

  // Gives memory that nothing uses back to the driver.
  void Trim() const;

  // Waits until the device has done all that it was given.
  void Wait() const;
};

// The operations that kinds of GPUs implement: vulkan.h, metal.h.
class Gpu {
 public:
  virtual ~Gpu() = default;

  // The best device of this machine. Throws kTarget where none can be used, or the runtime was built without.
  virtual Device Find(const std::string& cache) const = 0;

  // Compiles the kernels of a library for a device, whose driver has passed its check.
  virtual void Prepare(const Device&, const tvm::ffi::Module&, const std::string& /*cache*/) const {}
  virtual void Release(const Device&, const tvm::ffi::Module&) const {}

  // Gives memory that nothing uses back to the driver.
  virtual void Trim() const {}
};

// A library whose kernels are ready to run on a device.
class Prepared {
 public:
  // Throws kTarget for a driver that computes nonsense.
  Prepared(const Device& device, tvm::ffi::Module library, const std::string& cache);
  ~Prepared();
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

 private:
  const Device& device_;
  const tvm::ffi::Module library_;
};

// Copies bytes between tensors, each from its offset on. A tensor of the host has its numbers when this returns.
void CopyBytes(const tvm::runtime::Tensor& from, size_t from_offset, const tvm::runtime::Tensor& to, size_t to_offset,
               size_t bytes);
// The same from or to memory of the host.
void CopyIn(const void* from, const tvm::runtime::Tensor& to, size_t offset, size_t bytes);
void CopyOut(const tvm::runtime::Tensor& from, size_t offset, void* to, size_t bytes);

// Numbers that each step replaces: one tensor of a device, which grows where there are more of them.
class Reused {
 public:
  explicit Reused(const Device& device) : device_(&device) {}

  // The numbers of a tensor of the host in a tensor of the device, until the next call; on the host that tensor. All have
  // the same number of columns.
  const tvm::runtime::Tensor& Put(const tvm::runtime::Tensor& host);

 private:
  const Device* device_;
  tvm::runtime::Tensor whole_, view_;
};

// Kinds of devices that this runtime knows, in words; kernels may be compiled for others.
std::string Kinds();
bool IsKind(std::string_view kind);

// The error of a runtime without a kind of GPU, which `option` builds it with.
Error NotBuilt(const std::string& title, const std::string& option);

// The device that runs a bundle's code of a kind; `cache` is a folder for what is learned of drivers, "": none. Throws
// kTarget where there is none that can.
Device FindDevice(const std::string& kind, const std::string& cache);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_DEVICE_H_
