// Memory for a function's intermediate tensors, kept for the next call: a decode step allocates nothing.
#ifndef MLCPIPE_VULKAN_WORKSPACES_H_
#define MLCPIPE_VULKAN_WORKSPACES_H_

#include <vector>

#include "buffer.h"

namespace mlcpipe::vulkan {

class Device;

// This class does not lock: Device does. A returned buffer may be taken while batches still use it: later commands wait
// for them.
class Workspaces {
 public:
  explicit Workspaces(Device& device) : device_(device) {}
  // A buffer of at least `bytes`: the smallest idle one that fits, else a new one, which replaces the largest idle one,
  // because workspaces grow with the rows of a step. Raises.
  Buffer* Take(VkDeviceSize bytes);
  void Give(Buffer* buffer) noexcept;
  // Frees idle buffers.
  void Drop() noexcept;

 private:
  Device& device_;
  std::vector<Buffer*> idle_;  // the smallest first
  size_t alive_ = 0;           // idle and taken
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_WORKSPACES_H_
