// Memory that both host and device reach, through which data goes to buffers that the host does not see.
#ifndef MLCPIPE_VULKAN_STAGING_H_
#define MLCPIPE_VULKAN_STAGING_H_

#include <array>
#include <cstdint>

#include "buffer.h"

namespace mlcpipe::vulkan {

class Device;

// A ring of segments: while the device copies out of one, the host fills the next. Made on first use.
class UploadRing {
 public:
  static constexpr VkDeviceSize kSegmentBytes = VkDeviceSize{4} << 20;
  static constexpr int kSegments = 4;

  struct Room {
    Buffer* buffer;
    VkDeviceSize offset, bytes;
  };

  explicit UploadRing(Device& device) : device_(device) {}
  // Room for `wanted` bytes or as many as there are, for the batch that is being recorded.
  Room Take(VkDeviceSize wanted);
  void Destroy();

 private:
  void Advance();

  Device& device_;
  Buffer* buffer_ = nullptr;
  std::array<uint64_t, kSegments> last_use_{};
  int segment_ = 0;
  VkDeviceSize filled_ = 0;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_STAGING_H_
