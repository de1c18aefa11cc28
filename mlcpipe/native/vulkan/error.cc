#include "error.h"

#include <tvm/ffi/error.h>

#include <cstdio>

namespace mlcpipe::vulkan {

void Fail(const std::string& message) {
  TVM_FFI_THROW(RuntimeError) << "vulkan: " << message;
  TVM_FFI_UNREACHABLE();
}

void FailMemory(const std::string& message) {
  TVM_FFI_THROW(MemoryError) << "vulkan: " << message;
  TVM_FFI_UNREACHABLE();
}

std::string ResultName(VkResult result) {
#define MLCPIPE_NAME(name) \
  case name:               \
    return #name
  switch (result) {
    MLCPIPE_NAME(VK_SUCCESS);
    MLCPIPE_NAME(VK_NOT_READY);
    MLCPIPE_NAME(VK_TIMEOUT);
    MLCPIPE_NAME(VK_INCOMPLETE);
    MLCPIPE_NAME(VK_ERROR_OUT_OF_HOST_MEMORY);
    MLCPIPE_NAME(VK_ERROR_OUT_OF_DEVICE_MEMORY);
    MLCPIPE_NAME(VK_ERROR_INITIALIZATION_FAILED);
    MLCPIPE_NAME(VK_ERROR_DEVICE_LOST);
    MLCPIPE_NAME(VK_ERROR_MEMORY_MAP_FAILED);
    MLCPIPE_NAME(VK_ERROR_LAYER_NOT_PRESENT);
    MLCPIPE_NAME(VK_ERROR_EXTENSION_NOT_PRESENT);
    MLCPIPE_NAME(VK_ERROR_FEATURE_NOT_PRESENT);
    MLCPIPE_NAME(VK_ERROR_INCOMPATIBLE_DRIVER);
    MLCPIPE_NAME(VK_ERROR_TOO_MANY_OBJECTS);
    MLCPIPE_NAME(VK_ERROR_FRAGMENTED_POOL);
    MLCPIPE_NAME(VK_ERROR_OUT_OF_POOL_MEMORY);
    MLCPIPE_NAME(VK_ERROR_INVALID_SHADER_NV);
    MLCPIPE_NAME(VK_ERROR_UNKNOWN);
    default:
      return "VkResult " + std::to_string(static_cast<int>(result));
  }
#undef MLCPIPE_NAME
}

std::string DescribeResult(VkResult result, const char* call, const std::string& device) {
  const std::string detail = " (" + std::string(call) + ": " + ResultName(result) + ")";
  switch (result) {
    case VK_ERROR_DEVICE_LOST:
      return "the driver of " + device + " gave up the device: a kernel ran too long, or the driver or GPU failed" +
             detail + "; its contents are lost, load the model again, and see the system's log if this recurs";
    case VK_ERROR_OUT_OF_DEVICE_MEMORY:
      return device + " has no memory left" + detail + "; close what else uses it, or use a smaller model or context";
    case VK_ERROR_OUT_OF_HOST_MEMORY:
      return "the driver of " + device + " got no memory from the system" + detail + "; close other programs";
    default:
      return device + " refused a call" + detail + "; a newer driver may help";
  }
}

std::string SizeWords(uint64_t bytes) {
  static const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return std::to_string(bytes) + " bytes";
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.2f %s" : "%.1f %s", value, units[unit]);
  return text;
}

}  // namespace mlcpipe::vulkan
