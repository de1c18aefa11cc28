// Times of kernels, by the device's clock. While this is on, kernels run one by one.
#ifndef MLCPIPE_VULKAN_PROFILE_H_
#define MLCPIPE_VULKAN_PROFILE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "commands.h"

namespace mlcpipe::vulkan {

class Device;

struct KernelTime {
  int64_t calls = 0, nanoseconds = 0;
};

// This class does not lock: Device does.
class Profile {
 public:
  explicit Profile(Device& device) : device_(device) {}
  ~Profile();
  // Creates the driver's objects. Raises.
  void Create();
  // Records a launch between two timestamps; reads them once none is free.
  void Dispatch(const Launch& launch);
  // All launches so far, by kernel name. The device must be idle.
  const std::map<std::string, KernelTime>& Read();

 private:
  static constexpr uint32_t kMarks = 512;

  Device& device_;
  VkQueryPool pool_ = VK_NULL_HANDLE;
  std::vector<std::string> names_;  // of the launches with timestamps
  std::map<std::string, KernelTime> times_;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_PROFILE_H_
