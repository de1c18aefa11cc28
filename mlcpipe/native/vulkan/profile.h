// How long each kernel takes on the device, by its own clock; while this is on, kernels run one after another.
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

// Nothing here locks: Device does.
class Profile {
 public:
  explicit Profile(Device& device) : device_(device) {}
  ~Profile();
  // Makes what the driver may refuse; raises.
  void Create();
  // Records a launch between two marks of the clock; reads the marks when their number is used up.
  void Dispatch(const Launch& launch);
  // By name of the kernel, all launches so far. The device has nothing left to do.
  const std::map<std::string, KernelTime>& Read();

 private:
  static constexpr uint32_t kMarks = 512;

  Device& device_;
  VkQueryPool pool_ = VK_NULL_HANDLE;
  std::vector<std::string> names_;  // of the launches between the marks
  std::map<std::string, KernelTime> times_;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_PROFILE_H_
