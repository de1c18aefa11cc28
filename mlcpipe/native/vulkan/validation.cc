#include "validation.h"

#include <utility>

#include "error.h"

namespace mlcpipe::vulkan {

VkDebugUtilsMessengerCreateInfoEXT* Validation::CreateInfo() {
  info_.sType = VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT;
  info_.messageSeverity =
      VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT;
  info_.messageType = VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT;
  info_.pfnUserCallback = &Validation::Receive;
  info_.pUserData = this;
  return &info_;
}

VkBool32 Validation::Receive(VkDebugUtilsMessageSeverityFlagBitsEXT severity, VkDebugUtilsMessageTypeFlagsEXT,
                             const VkDebugUtilsMessengerCallbackDataEXT* data, void* self) {
  if (!(severity & VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT)) return VK_FALSE;
  auto* validation = static_cast<Validation*>(self);
  std::lock_guard<std::mutex> lock(validation->mutex_);
  constexpr size_t kMaxMessages = 100;
  if (validation->messages_.size() < kMaxMessages) validation->messages_.emplace_back(data->pMessage);
  return VK_FALSE;
}

std::vector<std::string> Validation::Take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(messages_, {});
}

void Validation::Raise() {
  std::vector<std::string> messages = Take();
  if (messages.empty()) return;
  std::string text = "validation: " + messages[0];
  for (size_t i = 1; i < messages.size(); ++i) text += "\n" + messages[i];
  Fail(text);
}

}  // namespace mlcpipe::vulkan
