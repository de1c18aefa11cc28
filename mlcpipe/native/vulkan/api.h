// Vulkan's functions as tables of pointers: the system's loader is opened at run time, never linked.
#ifndef MLCPIPE_VULKAN_API_H_
#define MLCPIPE_VULKAN_API_H_

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

#include "cooperative_matrix.h"

// Names without the prefix `vk`. An entry that a device lacks stays null only where it is listed as optional.
#define MLCPIPE_VK_INSTANCE(X)                                                                  \
  X(DestroyInstance)                                                                            \
  X(EnumeratePhysicalDevices) X(GetPhysicalDeviceProperties2) X(GetPhysicalDeviceFeatures2)     \
  X(GetPhysicalDeviceMemoryProperties2) X(GetPhysicalDeviceQueueFamilyProperties)               \
  X(EnumerateDeviceExtensionProperties) X(CreateDevice) X(GetDeviceProcAddr)

#define MLCPIPE_VK_DEVICE(X)                                                                    \
  X(DestroyDevice) X(DeviceWaitIdle) X(GetDeviceQueue)                                          \
  X(CreateBuffer) X(DestroyBuffer) X(GetBufferMemoryRequirements) X(BindBufferMemory)           \
  X(AllocateMemory) X(FreeMemory) X(MapMemory)                                                  \
  X(CreateCommandPool) X(DestroyCommandPool) X(ResetCommandPool) X(AllocateCommandBuffers)      \
  X(BeginCommandBuffer) X(EndCommandBuffer) X(QueueSubmit)                                      \
  X(CreateSemaphore) X(DestroySemaphore) X(WaitSemaphores) X(GetSemaphoreCounterValue)          \
  X(CmdPipelineBarrier) X(CmdBindPipeline) X(CmdBindDescriptorSets) X(CmdPushConstants)         \
  X(CmdDispatch) X(CmdCopyBuffer)                                                               \
  X(CreateShaderModule) X(DestroyShaderModule)                                                  \
  X(CreateDescriptorSetLayout) X(DestroyDescriptorSetLayout)                                    \
  X(CreatePipelineLayout) X(DestroyPipelineLayout)                                              \
  X(CreateDescriptorPool) X(DestroyDescriptorPool) X(ResetDescriptorPool)                       \
  X(AllocateDescriptorSets) X(UpdateDescriptorSets)                                             \
  X(CreatePipelineCache) X(DestroyPipelineCache) X(GetPipelineCacheData)                        \
  X(CreateComputePipelines) X(DestroyPipeline)                                                  \
  X(CreateQueryPool) X(DestroyQueryPool) X(CmdResetQueryPool) X(CmdWriteTimestamp)              \
  X(GetQueryPoolResults)

#define MLCPIPE_VK_MEMBER(name) PFN_vk##name name = nullptr;

namespace mlcpipe::vulkan {

struct InstanceFunctions {
  PFN_vkGetInstanceProcAddr GetInstanceProcAddr = nullptr;
  MLCPIPE_VK_INSTANCE(MLCPIPE_VK_MEMBER)
  PFN_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR GetMatrices = nullptr;  // optional
};

struct DeviceFunctions {
  MLCPIPE_VK_DEVICE(MLCPIPE_VK_MEMBER)
  PFN_vkCmdPushDescriptorSetKHR CmdPushDescriptorSetKHR = nullptr;  // optional
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_API_H_
