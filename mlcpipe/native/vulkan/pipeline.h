// Compute pipelines, and the layouts that kernels with equal arguments share.
#ifndef MLCPIPE_VULKAN_PIPELINE_H_
#define MLCPIPE_VULKAN_PIPELINE_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "adapter.h"
#include "api.h"

namespace mlcpipe::vulkan {

class Device;

// Arguments: storage buffers at set 0, bindings 0..n-1, and one range of push constants.
struct Layout {
  VkDescriptorSetLayout set = VK_NULL_HANDLE;
  VkPipelineLayout pipeline = VK_NULL_HANDLE;
  bool push = false;  // descriptors are pushed, else taken from Descriptors
};

struct PipelineSpec {
  std::string name;   // of the kernel, for errors
  std::string entry;  // OpEntryPoint
  const uint32_t* code;
  size_t code_bytes;
  uint32_t buffers;
  uint32_t push_bytes;
  uint32_t subgroup_size;  // 0: any
  bool full_subgroups;
};

struct Pipeline {
  std::shared_ptr<Device> device;
  std::string name;  // of the kernel
  VkPipeline handle = VK_NULL_HANDLE;
  const Layout* layout = nullptr;
  uint32_t buffers = 0, push_bytes = 0;
  uint64_t last_use = 0;  // a value of the device's timeline
};

// The driver's compiled pipelines, kept on the disk of one driver and device.
class PipelineCache {
 public:
  PipelineCache(const Adapter& adapter, const DeviceFunctions& functions, VkDevice device, const std::string& folder);
  ~PipelineCache();

  VkPipelineCache handle() const { return handle_; }
  // The file was there, whole and this driver's.
  bool loaded() const { return loaded_; }
  // Writes the file anew, whole or not at all. Returns "" or what went wrong: a cache is no reason to stop.
  std::string Save() const;

 private:
  const DeviceFunctions& functions_;
  VkDevice device_;
  VkPipelineCache handle_ = VK_NULL_HANDLE;
  std::string path_;
  bool loaded_ = false;
};

class Pipelines {
 public:
  Pipelines(const Adapter& adapter, const DeviceFunctions& functions, VkDevice device, const std::string& folder);
  ~Pipelines();

  // May be called by several threads at once. Fills all but `device`, `name` and `last_use`.
  VkResult Create(const PipelineSpec& spec, Pipeline* pipeline, const char** call);
  PipelineCache& cache() { return cache_; }

 private:
  VkResult FindLayout(uint32_t buffers, uint32_t push_bytes, const Layout** found, const char** call);

  const Adapter& adapter_;
  const DeviceFunctions& functions_;
  VkDevice device_;
  PipelineCache cache_;
  std::mutex mutex_;
  std::map<std::pair<uint32_t, uint32_t>, Layout> layouts_;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_PIPELINE_H_
