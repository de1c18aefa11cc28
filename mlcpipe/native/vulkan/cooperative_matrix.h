// VK_KHR_cooperative_matrix for headers older than 1.3.255 (2023), which Debian 12 has.
// Vulkan specification, VkPhysicalDeviceCooperativeMatrixFeaturesKHR.
#ifndef MLCPIPE_VULKAN_COOPERATIVE_MATRIX_H_
#define MLCPIPE_VULKAN_COOPERATIVE_MATRIX_H_

#include "api.h"

#ifndef VK_KHR_cooperative_matrix
#define VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME "VK_KHR_cooperative_matrix"
inline constexpr VkStructureType VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR =
    static_cast<VkStructureType>(1000506000);
struct VkPhysicalDeviceCooperativeMatrixFeaturesKHR {
  VkStructureType sType;
  void* pNext;
  VkBool32 cooperativeMatrix;
  VkBool32 cooperativeMatrixRobustBufferAccess;
};
#endif

#endif  // MLCPIPE_VULKAN_COOPERATIVE_MATRIX_H_
