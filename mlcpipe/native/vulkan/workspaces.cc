#include "workspaces.h"

#include <algorithm>
#include <bit>

#include "device.h"

namespace mlcpipe::vulkan {
namespace {

constexpr VkDeviceSize kMinBytes = 4096;

// Rounds up to one of four sizes per power of two: a growing batch needs a new size ever more rarely.
VkDeviceSize Rounded(VkDeviceSize bytes, VkDeviceSize max_bytes) {
  if (bytes <= kMinBytes) return kMinBytes;
  const VkDeviceSize step = std::bit_floor(bytes) / 4;
  return std::max(bytes, std::min((bytes + step - 1) / step * step, max_bytes));
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
    const VkDeviceSize max_bytes = device_.adapter().max_buffer_bytes() & ~VkDeviceSize{15};
    Buffer* buffer = device_.NewBuffer((Rounded(bytes, max_bytes) + 15) & ~VkDeviceSize{15}, MemoryKind::kDevice);
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
