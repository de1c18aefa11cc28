// A buffer on a device: what TVM holds as a data pointer.
#ifndef MLCPIPE_VULKAN_BUFFER_H_
#define MLCPIPE_VULKAN_BUFFER_H_

#include <cstdint>
#include <memory>

#include "api.h"
#include "memory.h"

namespace mlcpipe::vulkan {

class Device;

struct Buffer {
  Device* owner = nullptr;
  std::shared_ptr<Device> keep;  // of tensors: the device outlives them even when it was lost and replaced
  VkBuffer handle = VK_NULL_HANDLE;
  Piece piece;
  VkDeviceSize bytes = 0;      // a multiple of 16, so that vectors at the tail are inside
  char* host = nullptr;        // where the host sees it, null where it does not
  bool fast_to_read = false;   // by the host: cached
  uint64_t last_use = 0;       // the batch that uses it last, as a value of the timeline
  uint64_t read_epoch = 0;     // the epoch between barriers in which a kernel read or wrote it last
  uint64_t write_epoch = 0;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_BUFFER_H_
