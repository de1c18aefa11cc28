// Properties and features that a driver reports for a device. Opens and allocates nothing.
#ifndef MLCPIPE_VULKAN_ADAPTER_H_
#define MLCPIPE_VULKAN_ADAPTER_H_

#include <set>
#include <string>
#include <vector>

#include "api.h"

namespace mlcpipe::vulkan {

// Feature structures as one chain: those that a driver supports, or those that a device is opened with.
struct FeatureChain {
  VkPhysicalDeviceFeatures2 core{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
  VkPhysicalDeviceVulkan11Features v11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES};
  VkPhysicalDeviceVulkan12Features v12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
  VkPhysicalDeviceSubgroupSizeControlFeatures size_control{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES};
  VkPhysicalDeviceShaderIntegerDotProductFeatures dot{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES};
  VkPhysicalDeviceCooperativeMatrixFeaturesKHR matrix{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR, nullptr, VK_FALSE, VK_FALSE};

  // The head of a chain that includes the optional structures that `has_*` allow. Valid until this object moves.
  VkPhysicalDeviceFeatures2* Link(bool has_size_control, bool has_dot, bool has_matrix);
};

class Adapter {
 public:
  Adapter(const InstanceFunctions& functions, VkPhysicalDevice handle);
  Adapter(const Adapter&) = delete;
  Adapter& operator=(const Adapter&) = delete;

  const InstanceFunctions& functions() const { return functions_; }
  VkPhysicalDevice handle() const { return handle_; }
  // Why mlcpipe cannot use the device, or "".
  const std::string& problem() const { return problem_; }
  // "llvmpipe (LLVM 15.0.6, 256 bits) (llvmpipe Mesa 22.3.6)": name and driver.
  std::string title() const;
  // "discrete", "integrated", "virtual", "software" or "other"; and its rank, the best first.
  const char* type() const;
  int rank() const;
  // Host and device share one memory, so the host can access buffers in place.
  bool unified() const;
  // The host's cores run the kernels.
  bool software() const;

  const VkPhysicalDeviceProperties& properties() const { return properties_.properties; }
  const VkPhysicalDeviceLimits& limits() const { return properties_.properties.limits; }
  const VkPhysicalDeviceVulkan11Properties& v11() const { return v11_; }
  const VkPhysicalDeviceVulkan12Properties& v12() const { return v12_; }
  const VkPhysicalDeviceMemoryProperties& memory() const { return memory_; }
  uint32_t max_push_descriptors() const { return max_push_descriptors_; }
  uint32_t min_subgroup_size() const { return min_subgroup_size_; }
  uint32_t max_subgroup_size() const { return max_subgroup_size_; }
  bool can_require_subgroup_size() const { return can_require_subgroup_size_; }
  uint32_t queue_family() const { return queue_family_; }
  bool has_timestamps() const { return has_timestamps_; }
  // The largest tensor: limited by the size of a kernel argument and of an allocation.
  VkDeviceSize max_buffer_bytes() const;
  // Bytes of the largest heap on the device, and how many are free now (all if the driver does not report it).
  VkDeviceSize memory_bytes() const;
  VkDeviceSize free_bytes() const;

  // Names of features that kernels may require; see `known_features`.
  const std::set<std::string>& features() const { return features_; }
  static const std::set<std::string>& known_features();

  // The features to open a device with: all that kernels may use, and none that cost time, such as robust access.
  std::vector<const char*> Extensions() const;
  // Fills `chain` and returns its head.
  VkPhysicalDeviceFeatures2* Enable(FeatureChain* chain) const;

 private:
  bool HasExtension(const char* name) const { return extensions_.count(name) != 0; }
  void ReadExtensions();
  void ReadProperties();
  void ReadFeatures();
  void ReadMatrices();
  void ReadQueues();
  std::string FindProblem() const;

  const InstanceFunctions& functions_;
  VkPhysicalDevice handle_;
  std::set<std::string> extensions_;
  bool v1_3_ = false;
  VkPhysicalDeviceProperties2 properties_{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
  VkPhysicalDeviceVulkan11Properties v11_{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES};
  VkPhysicalDeviceVulkan12Properties v12_{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES};
  VkPhysicalDeviceMemoryProperties memory_{};
  FeatureChain supported_;
  std::set<std::string> features_;
  uint32_t max_push_descriptors_ = 0;
  uint32_t min_subgroup_size_ = 0, max_subgroup_size_ = 0;
  bool can_require_subgroup_size_ = false;
  bool has_size_control_ = false, has_dot_ = false, has_matrix_ = false;
  uint32_t queue_family_ = UINT32_MAX;
  bool has_timestamps_ = false;
  std::string problem_;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_ADAPTER_H_
