#include "staging.h"

#include <algorithm>

#include "device.h"

namespace mlcpipe::vulkan {

UploadRing::Room UploadRing::Take(VkDeviceSize requested) {
  if (buffer_ == nullptr) buffer_ = device_.NewBuffer(kSegments * kSegmentBytes, MemoryKind::kUpload);
  if (filled_ == kSegmentBytes || (filled_ != 0 && filled_ + requested > kSegmentBytes)) Advance();
  const VkDeviceSize bytes = std::min(requested, kSegmentBytes - filled_);
  Room room{buffer_, segment_ * kSegmentBytes + filled_, bytes};
  filled_ = std::min(kSegmentBytes, (filled_ + bytes + 15) & ~VkDeviceSize{15});
  last_use_[segment_] = device_.commands().next();
  return room;
}

void UploadRing::Advance() {
  Commands& commands = device_.commands();
  commands.Submit();  // the device copies this segment while the host fills the next one
  const int next = (segment_ + 1) % kSegments;
  if (!commands.IsDone(last_use_[next])) device_.Wait(last_use_[next]);
  segment_ = next;
  filled_ = 0;
}

void UploadRing::Destroy() {
  if (buffer_ != nullptr) device_.DeleteBuffer(buffer_);
  buffer_ = nullptr;
}

}  // namespace mlcpipe::vulkan
