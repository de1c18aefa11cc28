// Memory that a function takes for the time between its kernels, kept for the next call: a decode step allocates nothing.
#ifndef MLCPIPE_VULKAN_WORKSPACES_H_
#define MLCPIPE_VULKAN_WORKSPACES_H_

#include <vector>

#include "buffer.h"

namespace mlcpipe::vulkan {

class Device;

// Nothing here locks: Device does. What is given back may be taken while batches still use it, as every buffer may be
// written anew in later commands.
class Workspaces {
 public:
  explicit Workspaces(Device& device) : device_(device) {}
  // A buffer of at least `bytes`: the smallest idle one, else a new one, in whose place the largest idle one goes, since
  // workspaces grow with the length of a sequence. Raises.
  Buffer* Take(VkDeviceSize bytes);
  void Give(Buffer* buffer) noexcept;
  // Frees those that are idle.
  void Drop() noexcept;

 private:
  Device& device_;
  std::vector<Buffer*> idle_;  // the smallest first
  size_t alive_ = 0;           // idle or taken
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_WORKSPACES_H_
