// A few kernels against the host's arithmetic before a model is trusted to a driver (mlcpipe/devices/support/
// driver_check.py): one that computes nonsense is refused by name.
#ifndef MLCPIPE_RUNTIME_GPU_CHECK_H_
#define MLCPIPE_RUNTIME_GPU_CHECK_H_

#include <tvm/ffi/extra/module.h>

#include <string>

#include "device.h"

namespace mlcpipe {

// Runs the cases that a library has kernels for, unless this driver passed them before: `cache` is a folder that knows,
// "": none. Throws kTarget, which names the driver, where a number is wrong.
void CheckDriver(const Device& device, const tvm::ffi::Module& library, const std::string& cache);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_GPU_CHECK_H_
