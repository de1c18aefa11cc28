// Descriptor sets for one batch of commands, on devices without push descriptors. Pools are made once and reset.
#ifndef MLCPIPE_VULKAN_DESCRIPTORS_H_
#define MLCPIPE_VULKAN_DESCRIPTORS_H_

#include <vector>

#include "api.h"

namespace mlcpipe::vulkan {

class Descriptors {
 public:
  // A set of `layout`, good until Reset. `result` is the driver's answer; the set is null unless VK_SUCCESS.
  VkDescriptorSet Take(const DeviceFunctions& functions, VkDevice device, VkDescriptorSetLayout layout,
                       VkResult* result);
  // The batch has run: all sets are free.
  void Reset(const DeviceFunctions& functions, VkDevice device);
  void Destroy(const DeviceFunctions& functions, VkDevice device);
  size_t pool_count() const { return pools_.size(); }

 private:
  std::vector<VkDescriptorPool> pools_;
  size_t current_ = 0;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_DESCRIPTORS_H_
