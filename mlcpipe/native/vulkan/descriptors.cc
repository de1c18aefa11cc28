#include "descriptors.h"

namespace mlcpipe::vulkan {
namespace {

constexpr uint32_t kSets = 256;
constexpr uint32_t kBuffers = 8 * kSets;  // with more per set, only the next pool comes earlier

}  // namespace

VkDescriptorSet Descriptors::Take(const DeviceFunctions& functions, VkDevice device, VkDescriptorSetLayout layout,
                                  VkResult* result) {
  for (;; ++current_) {
    const bool fresh = current_ == pools_.size();
    if (fresh) {
      VkDescriptorPoolSize size{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, kBuffers};
      VkDescriptorPoolCreateInfo info{VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO};
      info.maxSets = kSets;
      info.poolSizeCount = 1;
      info.pPoolSizes = &size;
      VkDescriptorPool pool = VK_NULL_HANDLE;
      *result = functions.CreateDescriptorPool(device, &info, nullptr, &pool);
      if (*result != VK_SUCCESS) return VK_NULL_HANDLE;
      pools_.push_back(pool);
    }
    VkDescriptorSetAllocateInfo info{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO};
    info.descriptorPool = pools_[current_];
    info.descriptorSetCount = 1;
    info.pSetLayouts = &layout;
    VkDescriptorSet set = VK_NULL_HANDLE;
    *result = functions.AllocateDescriptorSets(device, &info, &set);
    if (*result == VK_SUCCESS) return set;
    const bool full = *result == VK_ERROR_OUT_OF_POOL_MEMORY || *result == VK_ERROR_FRAGMENTED_POOL;
    if (!full || fresh) return VK_NULL_HANDLE;
  }
}

void Descriptors::Reset(const DeviceFunctions& functions, VkDevice device) {
  for (size_t i = 0; i < pools_.size() && i <= current_; ++i) functions.ResetDescriptorPool(device, pools_[i], 0);
  current_ = 0;
}

void Descriptors::Destroy(const DeviceFunctions& functions, VkDevice device) {
  for (VkDescriptorPool pool : pools_) functions.DestroyDescriptorPool(device, pool, nullptr);
  pools_.clear();
  current_ = 0;
}

}  // namespace mlcpipe::vulkan
