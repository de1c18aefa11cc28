// The whole device API is one translation unit, so the compiler reads TVM's headers, most of the code, only once.
#include "device.cc"
#include "device_api.cc"
#include "gpu.mm"
#include "module.cc"
#include "plugin.h"

namespace mlcpipe::metal {

void Register() {
  RegisterDeviceApi();
  RegisterModules();
}

}  // namespace mlcpipe::metal
