// Commands of one queue: recorded into batches and submitted in order, with barriers where needed.
//
// Each batch has a value of a timeline semaphore. This class does not lock: Device does.
#ifndef MLCPIPE_VULKAN_COMMANDS_H_
#define MLCPIPE_VULKAN_COMMANDS_H_

#include <array>
#include <cstdint>

#include "api.h"
#include "buffer.h"
#include "descriptors.h"
#include "pipeline.h"

namespace mlcpipe::vulkan {

struct Launch {
  Pipeline* pipeline;
  Buffer* const* buffers;     // pipeline->buffers of them
  const uint8_t* writes;      // for each buffer: the kernel writes it
  char* push_constants;       // pipeline->push_bytes
  int32_t grid_base_offset;   // offset of the first workgroup in x; -1: none, groups[0] is within the limits
  uint32_t groups[3];
};

struct CommandCounts {
  int64_t dispatches = 0, copies = 0, submits = 0, barriers = 0;
};

class Commands {
 public:
  // The most buffers that a kernel may take.
  static constexpr uint32_t kMaxBuffers = 64;

  Commands(Device& device, VkQueue queue, uint32_t queue_family);
  ~Commands();
  // Creates the driver's objects. Raises.
  void Create();

  void Dispatch(const Launch& launch);
  void Copy(Buffer* from, VkDeviceSize from_offset, Buffer* to, VkDeviceSize to_offset, VkDeviceSize bytes);
  // Writes the device's clock into `query` after all commands recorded so far.
  void Timestamp(VkQueryPool pool, uint32_t query);

  // The values of the batch that is being recorded and of the last submitted one.
  uint64_t next() const { return next_; }
  uint64_t submitted() const { return next_ - 1; }
  // Submits the recorded commands, if any.
  void Submit();
  // Whether batch `value` has finished. Asks the driver only if necessary.
  bool IsDone(uint64_t value);
  // The same, but never asks the driver.
  bool IsKnownDone(uint64_t value) const;
  uint64_t Completed();
  // Records that a host waited for `value` elsewhere: see Device::Synchronize.
  void Finished(uint64_t value);
  VkSemaphore timeline() const { return timeline_; }
  // The device is idle: make the next batches short again, so that it starts early.
  void Rest() { limit_ = first_limit_; }

  const CommandCounts& counts() const { return counts_; }

 private:
  struct Batch {
    VkCommandPool pool = VK_NULL_HANDLE;
    VkCommandBuffer commands = VK_NULL_HANDLE;
    uint64_t value = 0;
    Descriptors descriptors;
  };
  static constexpr int kBatches = 8;
  // Commands per batch. A submission costs the host 5 us or more, a command 1 us, a kernel on a GPU 3 us or more: the
  // first batch keeps it busy while the second, four times as long, is recorded.
  static constexpr int kFirstLimit = 8, kGrowth = 4, kLastLimit = 256;

  VkCommandBuffer Begin();
  void Recorded();
  bool Conflicts(const Buffer* buffer, bool write) const;
  void Mark(Buffer* buffer, bool write);
  void Barrier();
  void Bind(VkCommandBuffer commands, const Launch& launch);
  void Run(VkCommandBuffer commands, const Launch& launch);

  Device& device_;
  VkQueue queue_;
  uint32_t queue_family_;
  VkSemaphore timeline_ = VK_NULL_HANDLE;
  std::array<Batch, kBatches> batches_;
  int slot_ = 0;
  bool recording_ = false;
  int recorded_ = 0;  // commands in the current batch
  const int first_limit_;
  int limit_;
  uint64_t next_ = 1, done_ = 0;
  uint64_t epoch_ = 1;  // barriers so far
  VkPipeline bound_ = VK_NULL_HANDLE;
  CommandCounts counts_;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_COMMANDS_H_
