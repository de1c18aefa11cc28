#include "vulkan.h"

#include <sys/stat.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "bundle/json.h"

#if defined(MLCPIPE_VULKAN)
#include "../vulkan/plugin.h"
#endif

namespace mlcpipe {
namespace {

using tvm::ffi::Function;
using tvm::ffi::Module;
using tvm::ffi::String;

Function Plugin(const char* name) { return Function::GetGlobalRequired(std::string("mlcpipe.vulkan.") + name); }

// Makes `vulkan:i` devices of TVM in this process. Throws kTarget for a runtime without.
void Load(const std::string& cache) {
#if defined(MLCPIPE_VULKAN)
  static std::once_flag once;
  std::call_once(once, [&] {
    vulkan::Register();
    Plugin("configure")(String(cache), false);
  });
#else
  static_cast<void>(cache);
  throw NotBuilt("Vulkan", "MLCPIPE_VULKAN");
#endif
}

// The drivers' descriptions of all devices, usable ones first: DescribeAll in mlcpipe/native/vulkan/globals.cc.
std::vector<JsonObject> Described() {
  const auto json = JsonObject::Parse(std::string(Plugin("describe")().cast<String>()), "Vulkan");
  if (const std::string problem = json.Text("problem"); !problem.empty()) {
    throw Error(Code::kTarget, problem).Next("install the GPU's driver, or use a bundle for the CPU");
  }
  return json.Objects("devices");
}

std::string TitleOf(const JsonObject& one) {
  const std::string driver = one.Text("driver"), info = one.Text("driver_info");
  return one.Text("name") + (driver.empty() ? "" : " [" + driver + (info.empty() ? "" : " " + info) + "]");
}

// The parts of a library that have kernels for Vulkan.
void VulkanParts(const Module& module, std::vector<Module>* parts) {
  if (std::string(module->kind()) == "vulkan") parts->push_back(module);
  for (const tvm::ffi::Any& imported : module->imports()) VulkanParts(imported.cast<Module>(), parts);
}

std::vector<Module> VulkanParts(const Module& module) {
  std::vector<Module> parts;
  VulkanParts(module, &parts);
  return parts;
}

class VulkanGpu final : public Gpu {
 public:
  Device Find(const std::string& cache) const final {
    Load(cache);
    std::string problems;
    for (const JsonObject& one : Described()) {
      if (const std::string problem = one.Text("problem"); !problem.empty()) {
        problems += (problems.empty() ? "" : "; ") + TitleOf(one) + ": " + problem;
        continue;
      }
      Device device;
      device.handle = {kDLVulkan, 0};  // the best one is listed first
      device.gpu = this;
      device.kind = "vulkan";
      device.title = TitleOf(one);
      device.driver = device.title + " " + one.Text("driver_uuid") + " " + one.Text("api_version") + " " +
                      std::to_string(one.Int("driver_version", 0, INT64_MAX));
      device.unified_memory = one.True("unified_memory");
      device.max_tensor_bytes = std::min<int64_t>(INT32_MAX, one.Object("limits").Int("max_buffer_bytes", 1, INT64_MAX));
      return device;
    }
    throw Error(Code::kTarget, "no Vulkan device can be used").Found(problems).Next("update its driver");
  }

  void Prepare(const Device& device, const Module& library, const std::string& cache) const final {
    for (const Module& part : VulkanParts(library)) Plugin("prepare")(part, device.handle.device_id, DefaultThreads());
    if (!cache.empty()) Plugin("save_pipelines")();  // for the next process; one that cannot write compiles again
  }

  void Release(const Device& device, const Module& library) const final {
    for (const Module& part : VulkanParts(library)) Plugin("release")(part, device.handle.device_id);
  }

  void Trim() const final { Plugin("trim")(); }
};

}  // namespace

const Gpu& Vulkan() {
  static const VulkanGpu gpu;
  return gpu;
}

}  // namespace mlcpipe
