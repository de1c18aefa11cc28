// Functions for hosts: settings, the list of devices, modules, counters.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <string>

#include "device.h"
#include "error.h"
#include "instance.h"
#include "module.h"
#include "plugin.h"

namespace mlcpipe::vulkan {
namespace {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

void Put(json::Object* object, const char* name, json::Value value) {
  object->Set(ffi::String(name), std::move(value));
}

json::Value Number(uint64_t value) { return static_cast<int64_t>(std::min<uint64_t>(value, INT64_MAX)); }

json::Value Text(const std::string& text) { return ffi::String(text); }

json::Array Numbers(const uint32_t* values, int count) {
  json::Array array;
  for (int i = 0; i < count; ++i) array.push_back(Number(values[i]));
  return array;
}

std::string Hex(const uint8_t* bytes, int count) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += digits[bytes[i] >> 4];
    text += digits[bytes[i] & 15];
  }
  return text;
}

json::Object DescribeLimits(const Adapter& adapter) {
  const VkPhysicalDeviceLimits& limits = adapter.limits();
  json::Object object;
  Put(&object, "max_buffer_bytes", Number(adapter.max_buffer_bytes()));
  Put(&object, "max_shared_memory_bytes", Number(limits.maxComputeSharedMemorySize));
  Put(&object, "max_threads", Number(limits.maxComputeWorkGroupInvocations));
  Put(&object, "max_workgroup_size", Numbers(limits.maxComputeWorkGroupSize, 3));
  Put(&object, "max_workgroups", Numbers(limits.maxComputeWorkGroupCount, 3));
  Put(&object, "max_push_constant_bytes", Number(limits.maxPushConstantsSize));
  Put(&object, "max_push_descriptors", Number(adapter.max_push_descriptors()));
  Put(&object, "subgroup_size", Number(adapter.v11().subgroupSize));
  Put(&object, "min_subgroup_size", Number(adapter.min_subgroup_size()));
  Put(&object, "max_subgroup_size", Number(adapter.max_subgroup_size()));
  Put(&object, "can_require_subgroup_size", adapter.can_require_subgroup_size());
  Put(&object, "has_timestamps", adapter.has_timestamps());
  return object;
}

json::Object Describe(const Adapter& adapter) {
  const VkPhysicalDeviceProperties& properties = adapter.properties();
  const uint32_t version = properties.apiVersion;
  json::Object object;
  Put(&object, "name", Text(properties.deviceName));
  Put(&object, "title", Text(adapter.title()));
  Put(&object, "type", Text(adapter.type()));
  Put(&object, "driver", Text(adapter.v12().driverName));
  Put(&object, "driver_info", Text(adapter.v12().driverInfo));
  Put(&object, "driver_version", Number(properties.driverVersion));
  Put(&object, "driver_uuid", Text(Hex(adapter.v11().driverUUID, VK_UUID_SIZE)));
  Put(&object, "device_uuid", Text(Hex(adapter.v11().deviceUUID, VK_UUID_SIZE)));
  Put(&object, "vendor_id", Number(properties.vendorID));
  Put(&object, "device_id", Number(properties.deviceID));
  Put(&object, "api_version",
      Text(std::to_string(VK_API_VERSION_MAJOR(version)) + "." + std::to_string(VK_API_VERSION_MINOR(version)) + "." +
           std::to_string(VK_API_VERSION_PATCH(version))));
  Put(&object, "problem", Text(adapter.problem()));
  Put(&object, "unified_memory", adapter.unified());
  if (!adapter.problem().empty()) return object;
  Put(&object, "memory_bytes", Number(adapter.memory_bytes()));
  Put(&object, "free_bytes", Number(adapter.free_bytes()));
  Put(&object, "limits", DescribeLimits(adapter));
  json::Array features;
  for (const std::string& feature : adapter.features()) features.push_back(Text(feature));
  Put(&object, "features", features);
  return object;
}

// {"problem": why there is no Vulkan, or "", "devices": [...]}. Usable ones come first: the i-th is `vulkan:i`.
ffi::String DescribeAll() {
  const Instance& instance = Instance::Get();
  json::Array devices;
  for (const auto& adapter : instance.adapters()) devices.push_back(Describe(*adapter));
  json::Object object;
  Put(&object, "problem", Text(instance.problem()));
  Put(&object, "devices", devices);
  return json::Stringify(object);
}

VulkanModule* AsVulkan(const ffi::Module& module) {
  if (std::string(module->kind()) != "vulkan") Fail("expected a module of kind vulkan");
  return static_cast<VulkanModule*>(const_cast<ffi::ModuleObj*>(module.get()));
}

ffi::Module LoadModule(const ffi::Bytes& bytes) { return ffi::Module(ffi::make_object<VulkanModule>(bytes)); }

ffi::Map<ffi::String, int64_t> Counts(int index) {
  ffi::Map<ffi::String, int64_t> counts;
  for (const auto& [name, count] : Device::Get(index)->Counts()) counts.Set(ffi::String(name), count);
  return counts;
}

// Kernel name -> [launches, nanoseconds] since `profile_start`.
ffi::Map<ffi::String, ffi::Array<int64_t>> StopProfile(int index) {
  ffi::Map<ffi::String, ffi::Array<int64_t>> times;
  for (const auto& [name, time] : Device::Get(index)->StopProfile()) {
    times.Set(ffi::String(name), ffi::Array<int64_t>{time.calls, time.nanoseconds});
  }
  return times;
}

// Returns memory that nothing uses to the drivers.
void TrimAll() {
  for (const std::shared_ptr<Device>& device : Device::AllOpen()) device->Trim();
}

// Writes the compiled pipelines of all open devices. Returns an error message or "".
ffi::String SavePipelines() {
  std::string problem;
  for (const std::shared_ptr<Device>& device : Device::AllOpen()) {
    const std::string error = device->SavePipelines();
    if (problem.empty()) problem = error;
  }
  return ffi::String(problem);
}

// For the end of the process: otherwise drivers unload while their threads still run.
void WaitForAll() {
  for (const std::shared_ptr<Device>& device : Device::AllOpen()) {
    if (!device->lost()) device->Synchronize();
  }
}

ffi::Array<ffi::String> TakeValidation() {
  ffi::Array<ffi::String> messages;
  for (const std::string& message : Instance::Get().validation().Take()) messages.push_back(ffi::String(message));
  return messages;
}

}  // namespace

void RegisterFunctions() {
  tvm::ffi::reflection::GlobalDef()
      .def("mlcpipe.vulkan.configure",
           [](ffi::String cache_folder, bool validation) {
             Instance::Configure(Options{std::string(cache_folder.data(), cache_folder.size()), validation});
           })
      .def("mlcpipe.vulkan.describe", DescribeAll)
      .def("mlcpipe.vulkan.create_module", LoadModule)
      .def("ffi.Module.load_from_bytes.vulkan", LoadModule)
      .def("mlcpipe.vulkan.module_bytes", [](ffi::Module module) { return AsVulkan(module)->SaveToBytes(); })
      .def("mlcpipe.vulkan.prepare",
           [](ffi::Module module, int index, int threads) { AsVulkan(module)->Prepare(index, threads); })
      .def("mlcpipe.vulkan.release", [](ffi::Module module, int index) { AsVulkan(module)->Release(index); })
      .def("mlcpipe.vulkan.counts", Counts)
      .def("mlcpipe.vulkan.profile_start", [](int index) { Device::Get(index)->StartProfile(); })
      .def("mlcpipe.vulkan.profile_stop", StopProfile)
      .def("mlcpipe.vulkan.trim", TrimAll)
      .def("mlcpipe.vulkan.save_pipelines", SavePipelines)
      .def("mlcpipe.vulkan.wait", WaitForAll)
      .def("mlcpipe.vulkan.validation_messages", TakeValidation);
}

}  // namespace mlcpipe::vulkan
