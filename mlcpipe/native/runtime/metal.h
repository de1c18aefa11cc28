// Apple's GPUs in a runtime that was built with MLCPIPE_METAL: mlcpipe/native/metal.
#ifndef MLCPIPE_RUNTIME_METAL_H_
#define MLCPIPE_RUNTIME_METAL_H_

#include "device.h"

namespace mlcpipe {

const Gpu& Metal();

// The system ends an app whose commands run in the background: none does when this returns, and others are refused until
// the app is back.
void SetBackground(bool background);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_METAL_H_
