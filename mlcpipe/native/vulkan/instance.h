// The system's Vulkan loader and its devices. One per process, created on first use.
#ifndef MLCPIPE_VULKAN_INSTANCE_H_
#define MLCPIPE_VULKAN_INSTANCE_H_

#include <memory>
#include <string>
#include <vector>

#include "adapter.h"
#include "api.h"
#include "validation.h"

namespace mlcpipe::vulkan {

// Settings before first use; see `Configure`.
struct Options {
  std::string cache_folder;  // for compiled pipelines; "": none on disk
  bool validation = false;   // the validation layer is active: its messages become errors
};

class Instance {
 public:
  // Does not raise if Vulkan is missing: then there are no adapters, and `problem()` says why.
  static Instance& Get();

  // Raises after first use, when settings have no effect any more.
  static void Configure(const Options& options);

  const Options& options() const { return options_; }
  const std::string& problem() const { return problem_; }
  Validation& validation() { return validation_; }

  // Usable ones first: discrete, integrated, software, each in the driver's order. `vulkan:i` is adapter i.
  const std::vector<std::unique_ptr<Adapter>>& adapters() const { return adapters_; }
  size_t usable_count() const { return usable_count_; }

 private:
  explicit Instance(Options options);

  // Each returns why there is no Vulkan, or "".
  std::string Open();
  std::string Create();
  std::string Enumerate();

  Options options_;
  std::string problem_;
  Validation validation_;
  InstanceFunctions functions_;
  VkInstance handle_ = VK_NULL_HANDLE;
  std::vector<std::unique_ptr<Adapter>> adapters_;
  size_t usable_count_ = 0;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_INSTANCE_H_
