#include "workspaces.h"

#include <algorithm>
#include <bit>

#include "device.h"

namespace mlcpipe::vulkan {
namespace {

constexpr VkDeviceSize kSmallest = 4096;

// Up to the next of four sizes between two powers of two: a sequence that grows meets a new size ever more rarely.
VkDeviceSize Rounded(VkDeviceSize bytes, VkDeviceSize most) {
  if (bytes <= kSmallest) return kSmallest;
  const VkDeviceSize step = std::bit_floor(bytes) / 4;
  return std::max(bytes, std::min((bytes + step - 1) / step * step, most));
}

bool Less(const Buffer* buffer, VkDeviceSize bytes) { return buffer->bytes < bytes; }

}  // namespace

Buffer* Workspaces::Take(VkDeviceSize bytes) {
  auto found = std::lower_bound(idle_.begin(), idle_.end(), bytes, Less);
  if (found == idle_.end()) {
    if (!idle_.empty()) {
      device_.DeleteBuffer(idle_.back());
      idle_.pop_back();
      --alive_;
    }
    idle_.reserve(alive_ + 1);  // so that Give cannot fail
    const VkDeviceSize most = device_.adapter().max_buffer_bytes() & ~VkDeviceSize{15};
    Buffer* buffer = device_.NewBuffer((Rounded(bytes, most) + 15) & ~VkDeviceSize{15}, MemoryKind::kDevice);
    ++alive_;
    return buffer;
  }
  Buffer* buffer = *found;
  idle_.erase(found);
  return buffer;
}

void Workspaces::Give(Buffer* buffer) noexcept {
  idle_.insert(std::lower_bound(idle_.begin(), idle_.end(), buffer->bytes, Less), buffer);
}

void Workspaces::Drop() noexcept {
  alive_ -= idle_.size();
  for (Buffer* buffer : idle_) device_.DeleteBuffer(buffer);
  idle_.clear();
}

}  // namespace mlcpipe::vulkan
