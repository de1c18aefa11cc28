// Messages of the validation layer, as errors. Off unless the process was started with the layer (see instance.cc).
#ifndef MLCPIPE_VULKAN_VALIDATION_H_
#define MLCPIPE_VULKAN_VALIDATION_H_

#include <mutex>
#include <string>
#include <vector>

#include "api.h"

namespace mlcpipe::vulkan {

class Validation {
 public:
  // For the chain of VkInstanceCreateInfo, to check the instance's creation too. Valid as long as this object.
  VkDebugUtilsMessengerCreateInfoEXT* CreateInfo();

  // Returns all messages so far and clears them.
  std::vector<std::string> Take();

  // Raises the messages so far as one error. Never called from a destructor.
  void Raise();

 private:
  static VKAPI_ATTR VkBool32 VKAPI_CALL Receive(VkDebugUtilsMessageSeverityFlagBitsEXT severity,
                                                VkDebugUtilsMessageTypeFlagsEXT types,
                                                const VkDebugUtilsMessengerCallbackDataEXT* data, void* self);

  VkDebugUtilsMessengerCreateInfoEXT info_{};
  std::mutex mutex_;
  std::vector<std::string> messages_;
};

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_VALIDATION_H_
