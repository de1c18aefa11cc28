// Memory of a device: buffers, workspaces, and freed buffers that batches may still use.
#include <algorithm>
#include <memory>

#include "device.h"
#include "error.h"

namespace mlcpipe::vulkan {

void Device::CheckSize(VkDeviceSize bytes) const {
  const VkDeviceSize most = adapter_.max_buffer_bytes();
  if (bytes > most) {
    const bool range = adapter_.limits().maxStorageBufferRange <= adapter_.v11().maxMemoryAllocationSize;
    FailMemory("a tensor of " + SizeWords(bytes) + " is larger than " + adapter_.title() + " allows: " +
               SizeWords(most) + (range ? " (maxStorageBufferRange)" : " (maxMemoryAllocationSize)") +
               "; use a smaller context or quantization, or another device");
  }
  if (bytes > adapter_.memory_bytes()) {
    FailMemory("a tensor of " + SizeWords(bytes) + " is larger than the memory of " + adapter_.title() + ", " +
               SizeWords(adapter_.memory_bytes()));
  }
}

VkResult Device::TryBuffer(VkDeviceSize bytes, MemoryKind kind, Buffer* buffer, const char** call) {
  VkBufferCreateInfo info{VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO};
  info.size = bytes;
  info.usage =
      VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
  *call = "vkCreateBuffer";
  VkResult result = functions_.CreateBuffer(handle_, &info, nullptr, &buffer->handle);
  if (result != VK_SUCCESS) return result;
  VkMemoryRequirements needs;
  functions_.GetBufferMemoryRequirements(handle_, buffer->handle, &needs);
  *call = "vkAllocateMemory";
  result = memory_->Take(needs, kind, &buffer->piece);
  if (result == VK_SUCCESS) {
    *call = "vkBindBufferMemory";
    result = functions_.BindBufferMemory(handle_, buffer->handle, buffer->piece.block->handle, buffer->piece.offset);
    if (result != VK_SUCCESS) memory_->Give(buffer->piece);
  }
  if (result != VK_SUCCESS) {
    functions_.DestroyBuffer(handle_, buffer->handle, nullptr);
    return result;
  }
  buffer->owner = this;
  buffer->bytes = bytes;
  char* mapped = buffer->piece.block->mapped;
  // Mapped memory of a discrete device is behind the bus: copies from staging memory are faster.
  const bool direct = kind != MemoryKind::kDevice || adapter_.unified();
  buffer->host = direct && mapped != nullptr ? mapped + buffer->piece.offset : nullptr;
  buffer->fast_to_read = memory_->IsCached(buffer->piece);
  return VK_SUCCESS;
}

Buffer* Device::NewBuffer(VkDeviceSize bytes, MemoryKind kind) {
  auto buffer = std::make_unique<Buffer>();
  const char* call = "";
  VkResult result = TryBuffer(bytes, kind, buffer.get(), &call);
  if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY) {
    // Running batches may still use freed buffers: wait, then return empty blocks to the driver.
    workspaces_.Drop();
    commands_->Submit();
    Wait(commands_->submitted());
    Reap();
    memory_->Trim();
    result = TryBuffer(bytes, kind, buffer.get(), &call);
  }
  if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY) {
    FailMemory("no room for " + SizeWords(bytes) + " more on " + adapter_.title() + ": " +
               SizeWords(memory_->used_bytes()) + " of " + SizeWords(adapter_.memory_bytes()) +
               " are in use here (" + call + "); close what else uses it, or use a smaller model or context");
  }
  Check(result, call);
  ++buffers_made_;
  ++buffers_alive_;
  return buffer.release();
}

void Device::DeleteBuffer(Buffer* buffer) noexcept {
  Bury(Grave{buffer->last_use, buffer->handle, buffer->piece, VK_NULL_HANDLE});
  --buffers_alive_;
  delete buffer;
}

Buffer* Device::Allocate(VkDeviceSize bytes) {
  CheckSize(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  CheckAlive();
  Reap();
  Buffer* buffer = NewBuffer(std::max<VkDeviceSize>((bytes + 15) & ~VkDeviceSize{15}, 16), MemoryKind::kDevice);
  buffer->keep = shared_from_this();
  return buffer;
}

void Device::Free(Buffer* buffer) noexcept {
  const std::shared_ptr<Device> device = std::move(buffer->keep);
  std::lock_guard<std::mutex> lock(device->mutex_);
  device->DeleteBuffer(buffer);
}

Buffer* Device::TakeWorkspace(VkDeviceSize bytes) {
  CheckSize(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  CheckAlive();
  Buffer* buffer = workspaces_.Take(bytes);
  buffer->keep = shared_from_this();
  return buffer;
}

void Device::GiveWorkspace(Buffer* buffer) noexcept {
  const std::shared_ptr<Device> device = std::move(buffer->keep);
  std::lock_guard<std::mutex> lock(device->mutex_);
  device->workspaces_.Give(buffer);
}

void Device::Trim() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  workspaces_.Drop();
  Reap();
  memory_->Trim();
}

// ---------------------------------------------------------------- freed objects

void Device::Bury(const Grave& grave) noexcept {
  constexpr size_t kMany = 256;
  graves_.push_back(grave);
  if (grave.value == 0 || graves_.size() >= kMany) Reap();
}

void Device::Reap() noexcept {
  if (graves_.empty()) return;
  try {
    if (!lost()) commands_->Completed();
  } catch (...) {  // the state is unknown: `lost` is set, or the driver will be asked again
  }
  auto done = [this](const Grave& grave) { return lost() || commands_->IsKnownDone(grave.value); };
  auto kept = graves_.begin();
  for (const Grave& grave : graves_) {
    if (done(grave)) {
      Erase(grave);
    } else {
      *kept++ = grave;
    }
  }
  graves_.erase(kept, graves_.end());
}

void Device::Erase(const Grave& grave) noexcept {
  if (grave.pipeline != VK_NULL_HANDLE) functions_.DestroyPipeline(handle_, grave.pipeline, nullptr);
  if (grave.buffer == VK_NULL_HANDLE) return;
  functions_.DestroyBuffer(handle_, grave.buffer, nullptr);
  memory_->Give(grave.piece);
}

}  // namespace mlcpipe::vulkan
