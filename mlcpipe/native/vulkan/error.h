// Error messages. `Fail` raises Python's RuntimeError, `FailMemory` MemoryError; both leave the process alive.
#ifndef MLCPIPE_VULKAN_ERROR_H_
#define MLCPIPE_VULKAN_ERROR_H_

#include <cstdint>
#include <string>

#include "api.h"

namespace mlcpipe::vulkan {

[[noreturn]] void Fail(const std::string& message);
[[noreturn]] void FailMemory(const std::string& message);

// The specification's name of a result.
std::string ResultName(VkResult result);

// Explains a failed call to the user of `device`, e.g. "Radeon RX 7600 (Mesa 25.0)".
std::string DescribeResult(VkResult result, const char* call, const std::string& device);

// "1.50 GiB", "64.0 MiB", "12 bytes".
std::string SizeWords(uint64_t bytes);

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_ERROR_H_
