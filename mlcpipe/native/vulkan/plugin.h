// Where a host that is linked with these sources begins.
#ifndef MLCPIPE_VULKAN_PLUGIN_H_
#define MLCPIPE_VULKAN_PLUGIN_H_

namespace mlcpipe::vulkan {

// Makes `device_api.vulkan`, `mlcpipe.vulkan.*` and modules of kind "vulkan" known to TVM. Once in a process.
void Register();

// Its two halves.
void RegisterDeviceApi();
void RegisterFunctions();

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_PLUGIN_H_
