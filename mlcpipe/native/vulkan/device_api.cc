// TVM's device API for `vulkan:i`.
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device.h"
#include "error.h"
#include "instance.h"
#include "module.h"
#include "plugin.h"

namespace mlcpipe::vulkan {
namespace {

namespace ffi = tvm::ffi;
using tvm::runtime::DeviceAttrKind;

std::string VersionText(uint32_t version) {
  return std::to_string(VK_API_VERSION_MAJOR(version)) + "." + std::to_string(VK_API_VERSION_MINOR(version)) + "." +
         std::to_string(VK_API_VERSION_PATCH(version));
}

const Adapter* FindAdapter(int index) {
  const Instance& instance = Instance::Get();
  if (index < 0 || static_cast<size_t>(index) >= instance.usable_count()) return nullptr;
  return instance.adapters()[index].get();
}

class VulkanDeviceApi final : public tvm::runtime::DeviceAPI {
 public:
  static VulkanDeviceApi* Get() {
    static auto* api = new VulkanDeviceApi();  // tensors may be freed after static objects
    return api;
  }

  void SetDevice(tvm::Device device) final { CurrentDevice() = device.device_id; }

  void GetAttr(tvm::Device device, DeviceAttrKind kind, ffi::Any* result) final {
    const Adapter* adapter = FindAdapter(device.device_id);
    if (kind == tvm::runtime::kExist) {
      *result = adapter != nullptr ? 1 : 0;
      return;
    }
    if (adapter == nullptr) Device::Get(device.device_id);  // raises an error that lists the devices
    const VkPhysicalDeviceLimits& limits = adapter->limits();
    switch (kind) {
      case tvm::runtime::kMaxThreadsPerBlock:
        *result = static_cast<int64_t>(limits.maxComputeWorkGroupInvocations);
        break;
      case tvm::runtime::kWarpSize:
        *result = static_cast<int64_t>(adapter->v11().subgroupSize);
        break;
      case tvm::runtime::kMaxSharedMemoryPerBlock:
        *result = static_cast<int64_t>(limits.maxComputeSharedMemorySize);
        break;
      case tvm::runtime::kComputeVersion:
        *result = ffi::String(VersionText(adapter->properties().apiVersion));
        break;
      case tvm::runtime::kDeviceName:
        *result = ffi::String(adapter->properties().deviceName);
        break;
      case tvm::runtime::kMaxThreadDimensions: {
        const uint32_t* size = limits.maxComputeWorkGroupSize;
        *result = ffi::String("[" + std::to_string(size[0]) + ", " + std::to_string(size[1]) + ", " +
                              std::to_string(size[2]) + "]");
        break;
      }
      case tvm::runtime::kApiVersion:
        *result = static_cast<int64_t>(adapter->properties().apiVersion);
        break;
      case tvm::runtime::kDriverVersion:
        *result = static_cast<int64_t>(adapter->properties().driverVersion);
        break;
      case tvm::runtime::kTotalGlobalMemory:
        *result = static_cast<int64_t>(adapter->memory_bytes());
        break;
      case tvm::runtime::kAvailableGlobalMemory:
        *result = static_cast<int64_t>(adapter->free_bytes());
        break;
      default:
        break;  // None: Vulkan does not report it
    }
  }

  void* AllocDataSpace(tvm::Device device, size_t bytes, size_t, DLDataType) final {
    return Device::Get(device.device_id)->Allocate(bytes);
  }

  void FreeDataSpace(tvm::Device, void* data) final { Device::Free(static_cast<Buffer*>(data)); }

  void* AllocWorkspace(tvm::Device device, size_t bytes, DLDataType) final {
    return Device::Get(device.device_id)->TakeWorkspace(bytes);
  }

  void FreeWorkspace(tvm::Device, void* data) final { Device::GiveWorkspace(static_cast<Buffer*>(data)); }

  void StreamSync(tvm::Device device, TVMStreamHandle) final { Device::Get(device.device_id)->Synchronize(); }

  using DeviceAPI::AllocDataSpace;

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes,
                      tvm::Device from_device, tvm::Device to_device, DLDataType, TVMStreamHandle) final {
    if (bytes == 0) return;
    auto* source = static_cast<Buffer*>(const_cast<void*>(from));
    auto* target = static_cast<Buffer*>(to);
    if (from_device.device_type != kDLVulkan) {
      target->owner->Upload(static_cast<const char*>(from) + from_offset, target, to_offset, bytes);
    } else if (to_device.device_type != kDLVulkan) {
      source->owner->Download(source, from_offset, static_cast<char*>(to) + to_offset, bytes);
    } else if (source->owner == target->owner) {
      source->owner->Copy(source, from_offset, target, to_offset, bytes);
    } else {
      CopyAcross(source, from_offset, target, to_offset, bytes);
    }
  }

 private:
  // Between devices, through the host.
  static void CopyAcross(Buffer* source, size_t from_offset, Buffer* target, size_t to_offset, size_t bytes) {
    constexpr size_t kPart = size_t{4} << 20;
    std::vector<char> part(std::min(bytes, kPart));
    for (size_t done = 0; done < bytes; done += part.size()) {
      const size_t count = std::min(bytes - done, part.size());
      source->owner->Download(source, from_offset + done, part.data(), count);
      target->owner->Upload(part.data(), target, to_offset + done, count);
    }
  }
};

// Attributes for a target with `-from_device`.
ffi::Any TargetProperty(tvm::Device device, const ffi::String& name) {
  const Adapter* adapter = FindAdapter(device.device_id);
  if (adapter == nullptr) return ffi::Any();
  const std::string property(name.data(), name.size());
  auto has = [&](const char* feature) { return adapter->features().count(feature) != 0; };
  if (property == "supports_float16") return has("shaderFloat16");
  if (property == "supports_float64") return has("shaderFloat64");
  if (property == "supports_int8") return has("shaderInt8");
  if (property == "supports_int16") return has("shaderInt16");
  if (property == "supports_int64") return has("shaderInt64");
  if (property == "supports_8bit_buffer") return has("storageBuffer8BitAccess");
  if (property == "supports_16bit_buffer") return has("storageBuffer16BitAccess");
  if (property == "supports_integer_dot_product") return has("shaderIntegerDotProduct");
  if (property == "supports_storage_buffer_storage_class") return true;
  if (property == "max_storage_buffer_range") return static_cast<int64_t>(adapter->limits().maxStorageBufferRange);
  if (property == "max_push_constants_size") return static_cast<int64_t>(adapter->limits().maxPushConstantsSize);
  if (property == "supported_subgroup_operations") {
    return static_cast<int64_t>(adapter->v11().subgroupSupportedOperations);
  }
  return ffi::Any();
}

}  // namespace

void RegisterDeviceApi() {
  namespace reflection = tvm::ffi::reflection;
  reflection::GlobalDef()
      .def_packed("device_api.vulkan",
                  [](ffi::PackedArgs, ffi::Any* result) {
                    tvm::runtime::DeviceAPI* api = VulkanDeviceApi::Get();  // cast to the base first: void* loses it
                    *result = static_cast<void*>(api);
                  })
      .def("device_api.vulkan.get_target_property", TargetProperty);
}

}  // namespace mlcpipe::vulkan
