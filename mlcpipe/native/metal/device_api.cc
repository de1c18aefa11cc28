// TVM's device API for `metal:0`.
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/device_api.h>

#include "device.h"
#include "plugin.h"

namespace mlcpipe::metal {
namespace {

namespace ffi = tvm::ffi;
using tvm::runtime::DeviceAttrKind;

class MetalDeviceApi final : public tvm::runtime::DeviceAPI {
 public:
  static MetalDeviceApi* Get() {
    static auto* api = new MetalDeviceApi();  // tensors may be freed after static objects
    return api;
  }

  void SetDevice(tvm::Device device) final {
    if (device.device_id != 0) TVM_FFI_THROW(RuntimeError) << "metal: there is one GPU, metal:0, not metal:" << device.device_id;
    Device::Get();
  }

  void GetAttr(tvm::Device device, DeviceAttrKind kind, ffi::Any* result) final {
    Device* found = device.device_id == 0 ? Device::Find() : nullptr;
    if (kind == tvm::runtime::kExist) *result = found ? 1 : 0;
    if (!found) return;
    if (kind == tvm::runtime::kDeviceName) *result = ffi::String(found->info().name);
    // A threadgroup of a kernel that needs many registers may have fewer.
    if (kind == tvm::runtime::kMaxThreadsPerBlock) *result = 1024;
    if (kind == tvm::runtime::kWarpSize) *result = 32;
    if (kind == tvm::runtime::kMaxSharedMemoryPerBlock) *result = static_cast<int64_t>(found->info().shared_bytes);
    if (kind == tvm::runtime::kTotalGlobalMemory) *result = static_cast<int64_t>(found->info().memory_bytes);
    if (kind == tvm::runtime::kAvailableGlobalMemory) *result = static_cast<int64_t>(found->free_bytes());
  }

  void* AllocDataSpace(tvm::Device, size_t bytes, size_t, DLDataType) final { return Device::Get().Allocate(bytes); }
  void FreeDataSpace(tvm::Device, void* data) final { Device::Get().Free(data); }
  // Commands keep what they use, so it may be freed at once.
  void* AllocWorkspace(tvm::Device, size_t bytes, DLDataType) final { return Device::Get().Allocate(bytes); }
  void FreeWorkspace(tvm::Device, void* data) final { Device::Get().Free(data); }
  void StreamSync(tvm::Device, TVMStreamHandle) final { Device::Get().Synchronize(); }

  using DeviceAPI::AllocDataSpace;

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes,
                      tvm::Device from_device, tvm::Device to_device, DLDataType, TVMStreamHandle) final {
    if (bytes == 0) return;
    if (from_device.device_type != kDLMetal) {
      Device::Get().Upload(static_cast<const char*>(from) + from_offset, to, to_offset, bytes);
    } else if (to_device.device_type != kDLMetal) {
      Device::Get().Download(from, from_offset, static_cast<char*>(to) + to_offset, bytes);
    } else {
      Device::Get().Copy(from, from_offset, to, to_offset, bytes);
    }
  }
};

}  // namespace

void RegisterDeviceApi() {
  tvm::ffi::reflection::GlobalDef()
      .def_packed("device_api.metal",
                  [](ffi::PackedArgs, ffi::Any* result) {
                    tvm::runtime::DeviceAPI* api = MetalDeviceApi::Get();  // cast to the base first: void* loses it
                    *result = static_cast<void*>(api);
                  })
      .def("mlcpipe.metal.set_background", [](bool background) { Device::Get().SetBackground(background); });
}

}  // namespace mlcpipe::metal
