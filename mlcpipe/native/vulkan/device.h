// An opened device: memory, queue, kernels. Several threads may call the functions that say "any thread".
#ifndef MLCPIPE_VULKAN_DEVICE_H_
#define MLCPIPE_VULKAN_DEVICE_H_

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "adapter.h"
#include "buffer.h"
#include "commands.h"
#include "memory.h"
#include "pipeline.h"
#include "profile.h"
#include "staging.h"
#include "validation.h"
#include "workspaces.h"

namespace mlcpipe::vulkan {

class Device : public std::enable_shared_from_this<Device> {
 public:
  // The device `vulkan:index`, opened on first use, and again after it was lost. Raises. Any thread.
  static Device* Get(int index);
  // The open devices. Any thread.
  static std::vector<std::shared_ptr<Device>> AllOpen();

  explicit Device(const Adapter& adapter);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Adapter& adapter() const { return adapter_; }
  const DeviceFunctions& functions() const { return functions_; }
  VkDevice handle() const { return handle_; }
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

  // ---- Any thread.
  // Raises MemoryError; does not call the driver if the size exceeds the device's limits.
  Buffer* Allocate(VkDeviceSize bytes);
  static void Free(Buffer* buffer) noexcept;
  // The same for buffers that a function needs in each call: see Workspaces.
  Buffer* TakeWorkspace(VkDeviceSize bytes);
  static void GiveWorkspace(Buffer* buffer) noexcept;
  // Returns unused memory to the driver.
  void Trim() noexcept;
  void Upload(const char* from, Buffer* to, VkDeviceSize offset, VkDeviceSize bytes);
  void Download(Buffer* from, VkDeviceSize offset, char* to, VkDeviceSize bytes);
  void Copy(Buffer* from, VkDeviceSize from_offset, Buffer* to, VkDeviceSize to_offset, VkDeviceSize bytes);
  void Dispatch(const Launch& launch);
  // Waits until all commands have finished.
  void Synchronize();
  std::unique_ptr<Pipeline> MakePipeline(const PipelineSpec& spec);
  static void DestroyPipeline(Pipeline* pipeline) noexcept;
  // Records a timestamp after all commands so far. Returns its slot, which must be read once and freed.
  uint32_t TakeTimestamp();
  uint64_t ReadTimestamp(uint32_t slot);
  void GiveTimestamp(uint32_t slot) noexcept;
  std::map<std::string, int64_t> Counts();
  // Between these two, launches are measured and run one by one. Raises if the device has no clock.
  void StartProfile();
  std::map<std::string, KernelTime> StopProfile();
  std::string SavePipelines();

  // ---- For the device's parts, which hold the lock.
  Commands& commands() { return *commands_; }
  // Raises unless VK_SUCCESS. Remembers that the device was lost.
  void Check(VkResult result, const char* call);
  void CheckAlive() const;
  void Wait(uint64_t value);
  Buffer* NewBuffer(VkDeviceSize bytes, MemoryKind kind);
  void DeleteBuffer(Buffer* buffer) noexcept;

 private:
  // Freed objects that a batch may still use.
  struct Grave {
    uint64_t value;
    VkBuffer buffer;
    Piece piece;
    VkPipeline pipeline;
  };

  void Open();
  void LoadFunctions();
  void CreateTimestamps();
  VkResult TryBuffer(VkDeviceSize bytes, MemoryKind kind, Buffer* buffer, const char** call);
  void CheckSize(VkDeviceSize bytes) const;
  void Bury(const Grave& grave) noexcept;
  void Erase(const Grave& grave) noexcept;
  void Reap() noexcept;
  // Waits without the lock, so other threads can record.
  void WaitUnlocked(std::unique_lock<std::mutex>& lock, uint64_t value);
  void DownloadStaged(Buffer* from, VkDeviceSize offset, char* to, VkDeviceSize bytes);
  void RaiseValidation();

  const Adapter& adapter_;
  DeviceFunctions functions_;
  VkDevice handle_ = VK_NULL_HANDLE;
  std::atomic<bool> lost_{false};
  std::mutex mutex_;
  std::mutex download_mutex_;  // taken before mutex_
  std::optional<Memory> memory_;
  std::optional<Pipelines> pipelines_;
  std::optional<Commands> commands_;
  UploadRing uploads_{*this};
  Workspaces workspaces_{*this};
  std::optional<Profile> profile_;
  Buffer* downloads_ = nullptr;
  std::vector<Grave> graves_;
  VkQueryPool timestamps_ = VK_NULL_HANDLE;
  std::vector<uint32_t> free_timestamps_;
  int64_t uploaded_bytes_ = 0, downloaded_bytes_ = 0;
  int64_t buffers_made_ = 0, buffers_alive_ = 0, pipelines_made_ = 0, pipelines_alive_ = 0;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_DEVICE_H_
