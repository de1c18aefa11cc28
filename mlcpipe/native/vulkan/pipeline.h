// Compute pipelines, and layouts, which kernels with the same numbers of arguments share.
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
  bool push = false;  // descriptors are pushed; otherwise they come from Descriptors
};

struct PipelineSpec {
  std::string name;   // the kernel's, for errors
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

// A cache on disk of a driver's compiled pipelines for one device.
class PipelineCache {
 public:
  PipelineCache(const Adapter& adapter, const DeviceFunctions& functions, VkDevice device, const std::string& folder);
  ~PipelineCache();

  VkPipelineCache handle() const { return handle_; }
  // Whether the file existed, complete and written by this driver.
  bool loaded() const { return loaded_; }
  // Replaces the file atomically. Returns an error message or "": a failing cache stops nothing.
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

  // Any thread. Fills all fields except `device`, `name` and `last_use`.
  VkResult Create(const PipelineSpec& spec, Pipeline* pipeline, const char** call);
  PipelineCache& cache() { return cache_; }

 private:
  VkResult FindLayout(uint32_t buffers, uint32_t push_bytes, const Layout** out, const char** call);

  const Adapter& adapter_;
  const DeviceFunctions& functions_;
  VkDevice device_;
  PipelineCache cache_;
  std::mutex mutex_;
  std::map<std::pair<uint32_t, uint32_t>, Layout> layouts_;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_PIPELINE_H_
