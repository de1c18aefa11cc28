// Descriptor sets for one batch of commands, on devices without push descriptors. Pools are reset and reused.
#ifndef MLCPIPE_VULKAN_DESCRIPTORS_H_
#define MLCPIPE_VULKAN_DESCRIPTORS_H_

#include <vector>

#include "api.h"

namespace mlcpipe::vulkan {

class Descriptors {
 public:
  // A set with `layout`, valid until Reset. `result` is the driver's; the set is null unless VK_SUCCESS.
  VkDescriptorSet Take(const DeviceFunctions& functions, VkDevice device, VkDescriptorSetLayout layout,
                       VkResult* result);
  // Frees all sets, once the batch has finished.
  void Reset(const DeviceFunctions& functions, VkDevice device);
  void Destroy(const DeviceFunctions& functions, VkDevice device);
  size_t pool_count() const { return pools_.size(); }

 private:
  std::vector<VkDescriptorPool> pools_;
  size_t current_ = 0;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_DESCRIPTORS_H_
