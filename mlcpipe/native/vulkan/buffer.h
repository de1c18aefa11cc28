// A buffer on a device. TVM holds it as a data pointer.
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
  std::shared_ptr<Device> keep;  // for tensors: the device outlives them even if it was lost and replaced
  VkBuffer handle = VK_NULL_HANDLE;
  Piece piece;
  VkDeviceSize bytes = 0;      // a multiple of 16, so a vector at the end fits
  char* host = nullptr;        // where the host maps it, or null
  bool fast_to_read = false;   // the host's mapping is cached
  uint64_t last_use = 0;       // the last batch that uses it, as a value of the timeline
  uint64_t read_epoch = 0;     // the epoch (between barriers) of the last access by a kernel
  uint64_t write_epoch = 0;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_BUFFER_H_
