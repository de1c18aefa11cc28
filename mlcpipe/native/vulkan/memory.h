// Device memory in large blocks that buffers share: drivers may allow only 4096 allocations, each of a page or more.
//
// Best fit with coalescing over two ordered indexes, O(log n). We do not use the Vulkan Memory Allocator, which Debian
// 12 lacks: storage buffers are the only resource here, so images, pools and defragmentation, most of that library's
// 19,000 lines, would never run.
#ifndef MLCPIPE_VULKAN_MEMORY_H_
#define MLCPIPE_VULKAN_MEMORY_H_

#include <list>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "adapter.h"
#include "api.h"

namespace mlcpipe::vulkan {

// Offsets and sizes in one block. Does not use Vulkan.
class FreeList {
 public:
  static constexpr VkDeviceSize kNone = ~VkDeviceSize{0};

  explicit FreeList(VkDeviceSize bytes);
  // The offset of `bytes` bytes at a multiple of `alignment`, or kNone.
  VkDeviceSize Take(VkDeviceSize bytes, VkDeviceSize alignment);
  void Give(VkDeviceSize offset, VkDeviceSize bytes);
  bool empty() const { return used_ == 0; }
  VkDeviceSize used() const { return used_; }

 private:
  void Insert(VkDeviceSize offset, VkDeviceSize bytes);
  void Erase(std::map<VkDeviceSize, VkDeviceSize>::iterator hole);

  std::map<VkDeviceSize, VkDeviceSize> by_offset_;
  std::set<std::pair<VkDeviceSize, VkDeviceSize>> by_size_;
  VkDeviceSize used_ = 0;
};

enum class MemoryKind {
  kDevice,    // for kernels; mapped if host and device share one memory
  kUpload,    // mapped, written by the host
  kDownload,  // mapped, read by the host: cached if the device has it
};

struct Block {
  VkDeviceMemory handle;
  VkDeviceSize bytes;
  uint32_t type;
  char* mapped;  // null if the host cannot map it
  bool pooled;   // else it holds a single buffer
  FreeList free;
};

// A piece of a block.
struct Piece {
  Block* block = nullptr;
  VkDeviceSize offset = 0, bytes = 0;
};

class Memory {
 public:
  Memory(const Adapter& adapter, const DeviceFunctions& functions, VkDevice device);
  ~Memory();  // all pieces must have been returned

  // VK_SUCCESS or the driver's last error. Tries every type of memory that fits `kind`.
  VkResult Take(const VkMemoryRequirements& needs, MemoryKind kind, Piece* piece);
  void Give(const Piece& piece);
  // Returns unused blocks to the driver.
  void Trim();

  bool IsCached(const Piece& piece) const;
  VkDeviceSize used_bytes() const { return used_; }
  VkDeviceSize block_bytes() const { return allocated_; }
  size_t block_count() const { return blocks_.size(); }

 private:
  VkResult TakeFrom(uint32_t type, const VkMemoryRequirements& needs, Piece* piece);
  VkResult AddBlock(uint32_t type, VkDeviceSize bytes, bool pooled, Block** added);
  void Drop(std::list<Block>::iterator block);

  const Adapter& adapter_;
  const DeviceFunctions& functions_;
  VkDevice device_;
  std::list<Block> blocks_;
  VkDeviceSize used_ = 0, allocated_ = 0;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_MEMORY_H_
