#include "memory.h"

#include <algorithm>
#include <vector>

namespace mlcpipe::vulkan {
namespace {

constexpr VkDeviceSize kBlockBytes = VkDeviceSize{64} << 20;
// Sizes are rounded up to this multiple, which limits fragmentation. Every alignment that drivers require divides it.
constexpr VkDeviceSize kGrain = 256;
// Memory types that are unsuitable for plain buffers.
constexpr VkMemoryPropertyFlags kStrange =
    VK_MEMORY_PROPERTY_PROTECTED_BIT | VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT |
    VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD | VK_MEMORY_PROPERTY_DEVICE_UNCACHED_BIT_AMD;
constexpr VkMemoryPropertyFlags kMapped = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;

VkDeviceSize RoundUp(VkDeviceSize value, VkDeviceSize multiple) { return (value + multiple - 1) / multiple * multiple; }

// Properties of suitable memory types, best first.
std::vector<VkMemoryPropertyFlags> PreferredProperties(MemoryKind kind, bool unified) {
  constexpr VkMemoryPropertyFlags device = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
  constexpr VkMemoryPropertyFlags cached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
  switch (kind) {
    case MemoryKind::kUpload:
      return {kMapped};
    case MemoryKind::kDownload:
      return {kMapped | cached, kMapped};
    default:
      if (unified) return {device | kMapped | cached, device | kMapped, device};
      return {device};
  }
}

}  // namespace

FreeList::FreeList(VkDeviceSize bytes) { Insert(0, bytes); }

void FreeList::Insert(VkDeviceSize offset, VkDeviceSize bytes) {
  by_offset_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void FreeList::Erase(std::map<VkDeviceSize, VkDeviceSize>::iterator hole) {
  by_size_.erase({hole->second, hole->first});
  by_offset_.erase(hole);
}

VkDeviceSize FreeList::Take(VkDeviceSize bytes, VkDeviceSize alignment) {
  for (auto best = by_size_.lower_bound({bytes, 0}); best != by_size_.end(); ++best) {
    const auto [hole, offset] = *best;
    const VkDeviceSize start = RoundUp(offset, alignment);
    if (start - offset > hole - bytes) continue;
    Erase(by_offset_.find(offset));
    if (start > offset) Insert(offset, start - offset);
    if (start + bytes < offset + hole) Insert(start + bytes, offset + hole - start - bytes);
    used_ += bytes;
    return start;
  }
  return kNone;
}

void FreeList::Give(VkDeviceSize offset, VkDeviceSize bytes) {
  used_ -= bytes;
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end() && next->first == offset + bytes) {
    bytes += next->second;
    auto after = std::next(next);
    Erase(next);
    next = after;
  }
  if (next != by_offset_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      Erase(previous);
    }
  }
  Insert(offset, bytes);
}

Memory::Memory(const Adapter& adapter, const DeviceFunctions& functions, VkDevice device)
    : adapter_(adapter), functions_(functions), device_(device) {}

Memory::~Memory() {
  for (Block& block : blocks_) functions_.FreeMemory(device_, block.handle, nullptr);
}

VkResult Memory::Take(const VkMemoryRequirements& needs, MemoryKind kind, Piece* piece) {
  VkResult result = VK_ERROR_OUT_OF_DEVICE_MEMORY;
  uint32_t tried = 0;
  for (VkMemoryPropertyFlags preferred : PreferredProperties(kind, adapter_.unified())) {
    for (uint32_t type = 0; type < adapter_.memory().memoryTypeCount; ++type) {
      const bool fits = needs.memoryTypeBits & (1u << type);
      const VkMemoryPropertyFlags has = adapter_.memory().memoryTypes[type].propertyFlags;
      if (!fits || (has & kStrange) || (has & preferred) != preferred || (tried & (1u << type))) continue;
      tried |= 1u << type;
      result = TakeFrom(type, needs, piece);
      if (result == VK_SUCCESS || result == VK_ERROR_DEVICE_LOST) return result;
    }
  }
  return result;
}

VkResult Memory::TakeFrom(uint32_t type, const VkMemoryRequirements& needs, Piece* piece) {
  const VkDeviceSize bytes = RoundUp(needs.size, kGrain);
  const VkDeviceSize alignment = std::max(needs.alignment, kGrain);
  const VkDeviceSize heap = adapter_.memory().memoryHeaps[adapter_.memory().memoryTypes[type].heapIndex].size;
  const VkDeviceSize block_bytes = std::min(kBlockBytes, RoundUp(heap / 16, kGrain));
  const bool pooled = bytes <= block_bytes / 2;
  auto take = [&](Block* block) {
    const VkDeviceSize offset = block->free.Take(bytes, alignment);
    if (offset == FreeList::kNone) return false;
    *piece = Piece{block, offset, bytes};
    used_ += bytes;
    return true;
  };
  if (pooled) {
    for (Block& block : blocks_) {
      if (block.pooled && block.type == type && take(&block)) return VK_SUCCESS;
    }
  }
  Block* added = nullptr;
  VkResult result = VK_ERROR_OUT_OF_DEVICE_MEMORY;
  if (pooled) result = AddBlock(type, block_bytes, true, &added);
  // For large buffers, or if the heap is nearly full: a block of exactly this size.
  if (result != VK_SUCCESS && result != VK_ERROR_DEVICE_LOST) result = AddBlock(type, bytes, false, &added);
  if (result != VK_SUCCESS) return result;
  return take(added) ? VK_SUCCESS : VK_ERROR_OUT_OF_DEVICE_MEMORY;
}

VkResult Memory::AddBlock(uint32_t type, VkDeviceSize bytes, bool pooled, Block** added) {
  VkMemoryAllocateInfo info{VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO};
  info.allocationSize = bytes;
  info.memoryTypeIndex = type;
  VkDeviceMemory handle = VK_NULL_HANDLE;
  VkResult result = functions_.AllocateMemory(device_, &info, nullptr, &handle);
  if (result != VK_SUCCESS) return result;
  void* mapped = nullptr;
  if ((adapter_.memory().memoryTypes[type].propertyFlags & kMapped) == kMapped) {
    result = functions_.MapMemory(device_, handle, 0, VK_WHOLE_SIZE, 0, &mapped);
    if (result != VK_SUCCESS) {
      functions_.FreeMemory(device_, handle, nullptr);
      return result;
    }
  }
  blocks_.push_back(Block{handle, bytes, type, static_cast<char*>(mapped), pooled, FreeList(bytes)});
  allocated_ += bytes;
  *added = &blocks_.back();
  return VK_SUCCESS;
}

void Memory::Give(const Piece& piece) {
  piece.block->free.Give(piece.offset, piece.bytes);
  used_ -= piece.bytes;
  if (!piece.block->free.empty()) return;
  // Keep one empty block per type, so that creating and freeing a buffer repeatedly does not call the driver.
  bool spare = false;
  auto self = blocks_.end();
  for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
    if (&*it == piece.block) {
      self = it;
    } else if (it->pooled && it->type == piece.block->type && it->free.empty()) {
      spare = true;
    }
  }
  if (!piece.block->pooled || spare) Drop(self);
}

void Memory::Trim() {
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    auto next = std::next(it);
    if (it->free.empty()) Drop(it);
    it = next;
  }
}

void Memory::Drop(std::list<Block>::iterator block) {
  allocated_ -= block->bytes;
  functions_.FreeMemory(device_, block->handle, nullptr);
  blocks_.erase(block);
}

bool Memory::IsCached(const Piece& piece) const {
  return adapter_.memory().memoryTypes[piece.block->type].propertyFlags & VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
}

}  // namespace mlcpipe::vulkan
