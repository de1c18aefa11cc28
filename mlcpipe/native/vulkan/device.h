// An opened device: memory, queue, kernels. Every public function that says so may be called by several threads.
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
  // The device behind `vulkan:index`, opened on first use, and anew after it was lost. Raises. Any thread.
  static Device* Get(int index);
  // Those that are open now. Any thread.
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
  // Raises MemoryError, before anything is asked of the driver where the size passes the device's limits.
  Buffer* Allocate(VkDeviceSize bytes);
  static void Free(Buffer* buffer) noexcept;
  // As these, for buffers that the same call takes again and again: see Workspaces.
  Buffer* TakeWorkspace(VkDeviceSize bytes);
  static void GiveWorkspace(Buffer* buffer) noexcept;
  // Gives memory that nothing uses now back to the driver.
  void Trim() noexcept;
  void Upload(const char* from, Buffer* to, VkDeviceSize offset, VkDeviceSize bytes);
  void Download(Buffer* from, VkDeviceSize offset, char* to, VkDeviceSize bytes);
  void Copy(Buffer* from, VkDeviceSize from_offset, Buffer* to, VkDeviceSize to_offset, VkDeviceSize bytes);
  void Dispatch(const Launch& launch);
  // Returns when all that was asked for has run.
  void Synchronize();
  std::unique_ptr<Pipeline> MakePipeline(const PipelineSpec& spec);
  static void DestroyPipeline(Pipeline* pipeline) noexcept;
  // A timestamp after all that was asked for so far: its slot, to be read once and given back.
  uint32_t TakeTimestamp();
  uint64_t ReadTimestamp(uint32_t slot);
  void GiveTimestamp(uint32_t slot) noexcept;
  std::map<std::string, int64_t> Counts();
  // From the one to the other every launch is measured, and runs alone. Raises where the device has no clock.
  void StartProfile();
  std::map<std::string, KernelTime> StopProfile();
  std::string SavePipelines();

  // ---- For the parts, under the lock.
  Commands& commands() { return *commands_; }
  // Raises unless VK_SUCCESS, and remembers a lost device.
  void Check(VkResult result, const char* call);
  void CheckAlive() const;
  void Wait(uint64_t value);
  Buffer* NewBuffer(VkDeviceSize bytes, MemoryKind kind);
  void DeleteBuffer(Buffer* buffer) noexcept;

 private:
  // What a batch may still use after it was freed.
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
  // Waits outside the lock, so that other threads go on recording.
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
