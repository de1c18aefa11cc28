// Memory that host and device can access, to copy data into buffers that the host cannot map.
#ifndef MLCPIPE_VULKAN_STAGING_H_
#define MLCPIPE_VULKAN_STAGING_H_

#include <array>
#include <cstdint>

#include "buffer.h"

namespace mlcpipe::vulkan {

class Device;

// A ring of segments: while the device copies from one, the host fills the next. Allocated on first use.
class UploadRing {
 public:
  static constexpr VkDeviceSize kSegmentBytes = VkDeviceSize{4} << 20;
  static constexpr int kSegments = 4;

  struct Room {
    Buffer* buffer;
    VkDeviceSize offset, bytes;
  };

  explicit UploadRing(Device& device) : device_(device) {}
  // Space for up to `requested` bytes, in the batch that is being recorded.
  Room Take(VkDeviceSize requested);
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
