// Vulkan devices (mlcpipe/devices/vulkan.py) in a runtime that was built with MLCPIPE_VULKAN. Nothing of Vulkan is
// loaded before the first bundle that asks for it.
#ifndef MLCPIPE_RUNTIME_VULKAN_H_
#define MLCPIPE_RUNTIME_VULKAN_H_

#include "device.h"

namespace mlcpipe {

// The first search in a process decides where compiled kernels are kept.
const Gpu& Vulkan();

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_VULKAN_H_
