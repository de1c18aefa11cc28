#include "device.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "instance.h"

namespace mlcpipe::vulkan {
namespace {

constexpr VkDeviceSize kDownloadBytes = VkDeviceSize{4} << 20;

void CheckRange(const Buffer* buffer, VkDeviceSize offset, VkDeviceSize bytes) {
  if (offset > buffer->bytes || bytes > buffer->bytes - offset) {
    Fail("a copy exceeds its buffer: " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
         " of " + std::to_string(buffer->bytes));
  }
}

}  // namespace

// ---------------------------------------------------------------- copies

void Device::Upload(const char* from, Buffer* to, VkDeviceSize offset, VkDeviceSize bytes) {
  CheckRange(to, offset, bytes);
  std::unique_lock<std::mutex> lock(mutex_);
  CheckAlive();
  uploaded_bytes_ += static_cast<int64_t>(bytes);
  if (to->host != nullptr) {
    const bool large = bytes > UploadRing::kSegmentBytes;
    if (large && !commands_->IsDone(to->last_use)) {
      commands_->Submit();
      WaitUnlocked(lock, to->last_use);
    }
    if (large || commands_->IsDone(to->last_use)) {
      lock.unlock();
      std::memcpy(to->host + offset, from, bytes);
      return;
    }
  }
  while (bytes != 0) {
    const UploadRing::Room room = uploads_.Take(bytes);
    std::memcpy(room.buffer->host + room.offset, from, room.bytes);
    commands_->Copy(room.buffer, room.offset, to, offset, room.bytes);
    from += room.bytes;
    offset += room.bytes;
    bytes -= room.bytes;
  }
}

void Device::Download(Buffer* from, VkDeviceSize offset, char* to, VkDeviceSize bytes) {
  CheckRange(from, offset, bytes);
  if (from->host != nullptr && from->fast_to_read) {
    std::unique_lock<std::mutex> lock(mutex_);
    CheckAlive();
    downloaded_bytes_ += static_cast<int64_t>(bytes);
    if (!commands_->IsDone(from->last_use)) {
      commands_->Submit();
      WaitUnlocked(lock, from->last_use);
    }
    commands_->Rest();
    lock.unlock();
    std::memcpy(to, from->host + offset, bytes);
  } else {
    DownloadStaged(from, offset, to, bytes);
  }
  RaiseValidation();
}

void Device::DownloadStaged(Buffer* from, VkDeviceSize offset, char* to, VkDeviceSize bytes) {
  std::lock_guard<std::mutex> one_at_a_time(download_mutex_);
  while (bytes != 0) {
    const VkDeviceSize part = std::min(bytes, kDownloadBytes);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      CheckAlive();
      if (downloads_ == nullptr) downloads_ = NewBuffer(kDownloadBytes, MemoryKind::kDownload);
      downloaded_bytes_ += static_cast<int64_t>(part);
      commands_->Copy(from, offset, downloads_, 0, part);
      commands_->Submit();
      WaitUnlocked(lock, commands_->submitted());
      commands_->Rest();
    }
    std::memcpy(to, downloads_->host, part);
    to += part;
    offset += part;
    bytes -= part;
  }
}

void Device::Copy(Buffer* from, VkDeviceSize from_offset, Buffer* to, VkDeviceSize to_offset, VkDeviceSize bytes) {
  CheckRange(from, from_offset, bytes);
  CheckRange(to, to_offset, bytes);
  const VkDeviceSize apart = from_offset > to_offset ? from_offset - to_offset : to_offset - from_offset;
  if (from == to && apart < bytes) Fail("a copy within one buffer overlaps itself");
  std::lock_guard<std::mutex> lock(mutex_);
  CheckAlive();
  commands_->Copy(from, from_offset, to, to_offset, bytes);
}

// ---------------------------------------------------------------- kernels

void Device::Dispatch(const Launch& launch) {
  std::lock_guard<std::mutex> lock(mutex_);
  CheckAlive();
  if (profile_) {
    profile_->Dispatch(launch);
  } else {
    commands_->Dispatch(launch);
  }
}

void Device::Synchronize() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    CheckAlive();
    commands_->Submit();
    WaitUnlocked(lock, commands_->submitted());
    commands_->Rest();
    Reap();
  }
  RaiseValidation();
}

void Device::Wait(uint64_t value) {
  value = std::min(value, commands_->submitted());
  VkSemaphore timeline = commands_->timeline();
  VkSemaphoreWaitInfo info{VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO};
  info.semaphoreCount = 1;
  info.pSemaphores = &timeline;
  info.pValues = &value;
  Check(functions_.WaitSemaphores(handle_, &info, UINT64_MAX), "vkWaitSemaphores");
  commands_->Finished(value);
}

void Device::WaitUnlocked(std::unique_lock<std::mutex>& lock, uint64_t value) {
  if (commands_->IsDone(value)) return;
  value = std::min(value, commands_->submitted());
  VkSemaphore timeline = commands_->timeline();
  lock.unlock();
  VkSemaphoreWaitInfo info{VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO};
  info.semaphoreCount = 1;
  info.pSemaphores = &timeline;
  info.pValues = &value;
  VkResult result = functions_.WaitSemaphores(handle_, &info, UINT64_MAX);
  lock.lock();
  Check(result, "vkWaitSemaphores");
  commands_->Finished(value);
}

std::unique_ptr<Pipeline> Device::MakePipeline(const PipelineSpec& spec) {
  CheckAlive();
  auto pipeline = std::make_unique<Pipeline>();
  const char* call = "";
  VkResult result = pipelines_->Create(spec, pipeline.get(), &call);
  if (result == VK_ERROR_DEVICE_LOST) lost_ = true;
  if (result != VK_SUCCESS) {
    const std::string message = "kernel " + spec.name + ": " + DescribeResult(result, call, adapter_.title());
    const bool memory = result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY;
    memory ? FailMemory(message) : Fail(message);
  }
  pipeline->device = shared_from_this();
  pipeline->name = spec.name;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++pipelines_made_;
    ++pipelines_alive_;
  }
  try {
    RaiseValidation();
  } catch (...) {
    DestroyPipeline(pipeline.release());
    throw;
  }
  return pipeline;
}

void Device::DestroyPipeline(Pipeline* pipeline) noexcept {
  const std::shared_ptr<Device> device = std::move(pipeline->device);
  std::lock_guard<std::mutex> lock(device->mutex_);
  --device->pipelines_alive_;
  device->Bury(Grave{pipeline->last_use, VK_NULL_HANDLE, Piece{}, pipeline->handle});
  delete pipeline;
}

// ---------------------------------------------------------------- errors

void Device::Check(VkResult result, const char* call) {
  if (result == VK_SUCCESS) return;
  if (result == VK_ERROR_DEVICE_LOST) lost_ = true;
  const std::string message = DescribeResult(result, call, adapter_.title());
  if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY) FailMemory(message);
  Fail(message);
}

void Device::CheckAlive() const {
  if (!lost()) return;
  Fail(adapter_.title() + " was lost with its contents; load the model again");
}

void Device::RaiseValidation() {
  if (Instance::Get().options().validation) Instance::Get().validation().Raise();
}

}  // namespace mlcpipe::vulkan
