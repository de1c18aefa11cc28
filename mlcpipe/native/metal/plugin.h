// Where a host that is linked with these sources begins.
#ifndef MLCPIPE_METAL_PLUGIN_H_
#define MLCPIPE_METAL_PLUGIN_H_

namespace mlcpipe::metal {

// Makes `device_api.metal`, `mlcpipe.metal.*` and modules of kind "metal" known to TVM. Once in a process.
void Register();

// Its two halves.
void RegisterDeviceApi();
void RegisterModules();

}  // namespace mlcpipe::metal

#endif  // MLCPIPE_METAL_PLUGIN_H_
