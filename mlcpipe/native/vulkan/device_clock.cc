// Measurements on a device: its clock, kernel times and counters.
#include "device.h"
#include "error.h"

namespace mlcpipe::vulkan {
namespace {

constexpr uint32_t kTimestamps = 256;

}  // namespace

void Device::CreateTimestamps() {
  VkQueryPoolCreateInfo info{VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO};
  info.queryType = VK_QUERY_TYPE_TIMESTAMP;
  info.queryCount = kTimestamps;
  Check(functions_.CreateQueryPool(handle_, &info, nullptr, &timestamps_), "vkCreateQueryPool");
  for (uint32_t slot = kTimestamps; slot-- > 0;) free_timestamps_.push_back(slot);
}

uint32_t Device::TakeTimestamp() {
  std::lock_guard<std::mutex> lock(mutex_);
  CheckAlive();
  if (free_timestamps_.empty()) Fail("more than " + std::to_string(kTimestamps / 2) + " timers run at once");
  const uint32_t slot = free_timestamps_.back();
  commands_->Timestamp(timestamps_, slot);
  free_timestamps_.pop_back();
  return slot;
}

uint64_t Device::ReadTimestamp(uint32_t slot) {
  uint64_t ticks = 0;
  Check(functions_.GetQueryPoolResults(handle_, timestamps_, slot, 1, sizeof ticks, &ticks, sizeof ticks,
                                       VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
        "vkGetQueryPoolResults");
  return ticks;
}

void Device::GiveTimestamp(uint32_t slot) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  free_timestamps_.push_back(slot);  // capacity is reserved for all slots
}

std::map<std::string, int64_t> Device::Counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  const CommandCounts& counts = commands_->counts();
  return {
      {"dispatches", counts.dispatches},
      {"copies", counts.copies},
      {"submits", counts.submits},
      {"barriers", counts.barriers},
      {"uploaded_bytes", uploaded_bytes_},
      {"downloaded_bytes", downloaded_bytes_},
      {"buffers_made", buffers_made_},
      {"buffers_alive", buffers_alive_},
      {"pipelines_made", pipelines_made_},
      {"pipelines_alive", pipelines_alive_},
      {"blocks", static_cast<int64_t>(memory_->block_count())},
      {"block_bytes", static_cast<int64_t>(memory_->block_bytes())},
      {"used_bytes", static_cast<int64_t>(memory_->used_bytes())},
      {"cache_loaded", pipelines_->cache().loaded()},
  };
}

void Device::StartProfile() {
  std::lock_guard<std::mutex> lock(mutex_);
  CheckAlive();
  if (!adapter_.has_timestamps()) Fail(adapter_.title() + " has no clock to measure kernels with");
  profile_.emplace(*this);
  try {
    profile_->Create();
  } catch (...) {
    profile_.reset();
    throw;
  }
}

std::map<std::string, KernelTime> Device::StopProfile() {
  std::lock_guard<std::mutex> lock(mutex_);
  CheckAlive();
  if (!profile_) Fail("kernels are not being measured");
  std::map<std::string, KernelTime> times = profile_->Read();
  profile_.reset();
  return times;
}

}  // namespace mlcpipe::vulkan
