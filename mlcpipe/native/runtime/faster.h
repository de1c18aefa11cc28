// Two bundles of one model, for the CPU and for a GPU: which of them answers faster on this machine.
#ifndef MLCPIPE_RUNTIME_FASTER_H_
#define MLCPIPE_RUNTIME_FASTER_H_

#include <functional>
#include <memory>
#include <string>

#include "engine.h"

namespace mlcpipe {

// An engine of the bundle that `on_cpu` opens, or of the one at `gpu_path` where that is for a device whose driver can
// be trusted and answers faster by a good part. The choice is measured once for each driver and model, with some 40
// tokens on each; without a cache in each process. Throws kUsage for bundles of different models, and what the
// engine of the CPU throws.
std::shared_ptr<Engine> OpenFaster(const std::function<std::unique_ptr<const Files>()>& on_cpu,
                                   const std::string& gpu_path, const Engine::Options& options);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_FASTER_H_
