// The whole plugin is one translation unit, so the compiler reads TVM's headers, most of the code, only once.
#include "adapter.cc"
#include "commands.cc"
#include "descriptors.cc"
#include "device.cc"
#include "device_api.cc"
#include "device_clock.cc"
#include "device_memory.cc"
#include "device_open.cc"
#include "error.cc"
#include "globals.cc"
#include "instance.cc"
#include "kernel.cc"
#include "memory.cc"
#include "module.cc"
#include "pipeline.cc"
#include "pipeline_cache.cc"
#include "plugin.h"
#include "profile.cc"
#include "program.cc"
#include "spirv_check.cc"
#include "staging.cc"
#include "timer.cc"
#include "validation.cc"
#include "workspaces.cc"

namespace mlcpipe::vulkan {

void Register() {
  RegisterDeviceApi();
  RegisterFunctions();
}

#if !defined(MLCPIPE_VULKAN)  // a shared library for Python: what is linked with a runtime waits for its call
TVM_FFI_STATIC_INIT_BLOCK() { Register(); }
#endif

}  // namespace mlcpipe::vulkan
