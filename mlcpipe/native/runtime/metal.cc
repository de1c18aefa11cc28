#include "metal.h"

#include <algorithm>
#include <mutex>

#include "error.h"

#if defined(MLCPIPE_METAL)
#include "../metal/device.h"
#include "../metal/plugin.h"
#endif

namespace mlcpipe {
namespace {

// Kernels index the elements of a tensor, of two bytes or more, with 32 bits.
constexpr uint64_t kMaxTensorBytes = UINT32_MAX;

class MetalGpu final : public Gpu {
 public:
  Device Find(const std::string&) const final {
#if defined(MLCPIPE_METAL)
    static std::once_flag once;
    std::call_once(once, metal::Register);
    const metal::Device* found = metal::Device::Find();
    if (!found) throw Error(Code::kTarget, "this machine has no GPU for Metal").Next("use a bundle for the CPU");
    const metal::GpuInfo& info = found->info();
    Device device;
    device.handle = {kDLMetal, 0};
    device.gpu = this;
    device.kind = "metal";
    device.title = info.name;
    device.driver = info.name + " " + info.system;
    device.max_tensor_bytes = static_cast<int64_t>(std::min(kMaxTensorBytes, info.max_buffer_bytes));
    return device;
#else
    throw NotBuilt("Metal", "MLCPIPE_METAL");
#endif
  }
};

}  // namespace

const Gpu& Metal() {
  static const MetalGpu gpu;
  return gpu;
}

void SetBackground([[maybe_unused]] bool background) {
#if defined(MLCPIPE_METAL)
  if (metal::Device* found = metal::Device::Find()) found->SetBackground(background);
#endif
}

}  // namespace mlcpipe
