// File: "MLCVKPC1", u64 FNV-1a of the data, u64 size, the driver's data. Drivers check little of it, and a truncated
// file crashes some of them: data with the wrong hash never reaches the driver.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "pipeline.h"

namespace mlcpipe::vulkan {
namespace {

constexpr char kFileMagic[8] = {'M', 'L', 'C', 'V', 'K', 'P', 'C', '1'};
constexpr size_t kHeader = 24;
constexpr size_t kMaxBytes = size_t{1} << 30;

uint64_t Sum(const char* data, size_t size) {
  uint64_t sum = 14695981039346656037ull;
  for (size_t i = 0; i < size; ++i) sum = (sum ^ static_cast<uint8_t>(data[i])) * 1099511628211ull;
  return sum;
}

std::string FileName(const Adapter& adapter) {
  const VkPhysicalDeviceProperties& device = adapter.properties();
  char text[128];
  int length = std::snprintf(text, sizeof text, "pipelines-%08x-%08x-%08x-", device.vendorID, device.deviceID,
                             device.driverVersion);
  auto append = [&](const uint8_t* uuid) {
    for (uint32_t i = 0; i < VK_UUID_SIZE; ++i) length += std::snprintf(text + length, sizeof text - length, "%02x", uuid[i]);
  };
  append(adapter.v11().driverUUID);
  append(device.pipelineCacheUUID);
  return std::string(text) + ".bin";
}

// The data of a complete file, or nothing.
std::vector<char> Read(const std::string& path) {
  std::vector<char> data;
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return data;
  char header[kHeader];
  uint64_t sum = 0, size = 0;
  if (std::fread(header, 1, kHeader, file) == kHeader && std::memcmp(header, kFileMagic, sizeof kFileMagic) == 0) {
    std::memcpy(&sum, header + 8, 8);
    std::memcpy(&size, header + 16, 8);
    struct stat facts{};
    if (fstat(fileno(file), &facts) == 0 && size <= kMaxBytes && static_cast<uint64_t>(facts.st_size) == kHeader + size) {
      data.resize(size);
      if (std::fread(data.data(), 1, size, file) != size || Sum(data.data(), size) != sum) data.clear();
    }
  }
  std::fclose(file);
  return data;
}

}  // namespace

PipelineCache::PipelineCache(const Adapter& adapter, const DeviceFunctions& functions, VkDevice device,
                             const std::string& folder)
    : functions_(functions), device_(device) {
  std::vector<char> data;
  if (!folder.empty()) {
    path_ = folder + "/" + FileName(adapter);
    data = Read(path_);
  }
  VkPipelineCacheCreateInfo info{VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO};
  info.initialDataSize = data.size();
  info.pInitialData = data.data();
  loaded_ = !data.empty() && functions_.CreatePipelineCache(device_, &info, nullptr, &handle_) == VK_SUCCESS;
  if (loaded_) return;
  info.initialDataSize = 0;
  // Without a cache, pipelines are compiled each time: slower but correct.
  if (functions_.CreatePipelineCache(device_, &info, nullptr, &handle_) != VK_SUCCESS) handle_ = VK_NULL_HANDLE;
}

PipelineCache::~PipelineCache() {
  if (handle_ != VK_NULL_HANDLE) functions_.DestroyPipelineCache(device_, handle_, nullptr);
}

std::string PipelineCache::Save() const {
  if (path_.empty() || handle_ == VK_NULL_HANDLE) return "";
  size_t size = 0;
  if (functions_.GetPipelineCacheData(device_, handle_, &size, nullptr) != VK_SUCCESS || size > kMaxBytes) {
    return "the driver does not give its compiled pipelines";
  }
  std::vector<char> data(kHeader + size);
  if (functions_.GetPipelineCacheData(device_, handle_, &size, data.data() + kHeader) != VK_SUCCESS) {
    return "the driver does not give its compiled pipelines";
  }
  const uint64_t count = size, sum = Sum(data.data() + kHeader, size);
  std::memcpy(data.data(), kFileMagic, sizeof kFileMagic);
  std::memcpy(data.data() + 8, &sum, 8);
  std::memcpy(data.data() + 16, &count, 8);
  const std::string partial = path_ + ".partial-" + std::to_string(getpid());
  const int file = open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return "cannot write " + partial + ": " + std::strerror(errno);
  size_t written = 0;
  while (written < kHeader + size) {
    const ssize_t count_now = write(file, data.data() + written, kHeader + size - written);
    if (count_now <= 0) break;
    written += static_cast<size_t>(count_now);
  }
  const bool whole = written == kHeader + size && fsync(file) == 0;
  const bool closed = close(file) == 0;
  if (whole && closed && rename(partial.c_str(), path_.c_str()) == 0) return "";
  const std::string reason = std::strerror(errno);
  unlink(partial.c_str());
  return "cannot write " + path_ + ": " + reason;
}

}  // namespace mlcpipe::vulkan
