// `runtime.timer.vulkan`: the device's clock if it has one, else the host's clock around a wait.
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/timer.h>

#include <chrono>
#include <memory>

#include "device.h"

namespace mlcpipe::vulkan {
namespace {

namespace ffi = tvm::ffi;

class VulkanTimer final : public tvm::runtime::TimerNode {
 public:
  explicit VulkanTimer(int index) : device_(Device::Get(index)->shared_from_this()) {}

  ~VulkanTimer() final {
    for (int i = 0; i < taken_; ++i) device_->GiveTimestamp(slots_[i]);
  }

  void Start() final { Mark(0); }
  void Stop() final { Mark(1); }

  int64_t SyncAndGetElapsedNanos() final {
    device_->Synchronize();
    if (!device_->adapter().has_timestamps()) {
      return std::chrono::duration_cast<std::chrono::nanoseconds>(host_[1] - host_[0]).count();
    }
    const uint64_t ticks = device_->ReadTimestamp(slots_[1]) - device_->ReadTimestamp(slots_[0]);
    return static_cast<int64_t>(static_cast<double>(ticks) * device_->adapter().limits().timestampPeriod);
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("mlcpipe.VulkanTimer", VulkanTimer, tvm::runtime::TimerNode);

 private:
  void Mark(int which) {
    if (device_->adapter().has_timestamps()) {
      slots_[which] = device_->TakeTimestamp();
      ++taken_;
    } else {
      device_->Synchronize();
      host_[which] = std::chrono::steady_clock::now();
    }
  }

  std::shared_ptr<Device> device_;
  uint32_t slots_[2] = {0, 0};
  int taken_ = 0;
  std::chrono::steady_clock::time_point host_[2];
};

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("runtime.timer.vulkan", [](tvm::Device device) {
    return ffi::ObjectRef(ffi::make_object<VulkanTimer>(device.device_id));
  });
}

}  // namespace mlcpipe::vulkan
