// Vulkan devices (mlcpipe/devices/vulkan.py) in a runtime that was built with MLCPIPE_VULKAN. Nothing of Vulkan is
// loaded before the first bundle that asks for it.
#ifndef MLCPIPE_RUNTIME_VULKAN_H_
#define MLCPIPE_RUNTIME_VULKAN_H_

#include <tvm/ffi/extra/module.h>

#include <cstdint>
#include <string>

#include "device.h"

namespace mlcpipe {

// The best device of this machine. The first call in a process decides where compiled kernels are kept. Throws kTarget.
Device FindVulkan(const std::string& cache);

int64_t VulkanFreeBytes(int index);

// Compiles all kernels of a library for a device, after the driver check, if this driver did not pass it before.
void PrepareVulkan(const Device& device, const tvm::ffi::Module& library, const std::string& cache);
void TrimVulkan();
void ReleaseVulkan(const Device& device, const tvm::ffi::Module& library);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_VULKAN_H_
