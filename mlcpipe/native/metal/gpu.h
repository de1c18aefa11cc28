// The functions of Apple's GPU that the device API needs: gpu.mm takes them from Metal. No call is made while another one runs.
#ifndef MLCPIPE_METAL_GPU_H_
#define MLCPIPE_METAL_GPU_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mlcpipe::metal {

struct GpuInfo {
  std::string name, system;       // the system has the driver, and a version
  uint64_t memory_bytes = 0;      // that the system recommends to use at most
  uint64_t max_buffer_bytes = 0;  // of one buffer
  uint64_t shared_bytes = 0;      // of a threadgroup
};

// Memory that the GPU shares with the CPU.
struct Memory {
  void* buffer = nullptr;
  char* contents = nullptr;
};

struct Pipeline {
  void* state = nullptr;
  size_t max_threads = 0;  // of a threadgroup
};

struct Launch {
  void* pipeline = nullptr;
  std::vector<void*> buffers;       // at the indices 0, 1, …
  const void* constants = nullptr;  // at the next index, if there are any
  size_t constant_bytes = 0;
  size_t groups[3] = {1, 1, 1};
  size_t threads[3] = {1, 1, 1};  // of a threadgroup
};

class Gpu {
 public:
  virtual ~Gpu() = default;

  virtual const GpuInfo& info() const = 0;
  virtual uint64_t free_bytes() const = 0;

  // Null where the system has no memory.
  virtual Memory Allocate(size_t bytes) = 0;
  // Compiles one kernel. On failure `state` is null, and `problem` has the compiler's messages.
  virtual Pipeline Compile(const std::string& kernel, const std::string& source, std::string* problem) = 0;
  // Gives a buffer or a pipeline back; submitted commands keep what they use.
  virtual void Release(void* object) = 0;

  // These add a command, which runs after those before it.
  virtual void Dispatch(const Launch& launch) = 0;
  virtual void Copy(void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes) = 0;

  // Hands the commands to the GPU.
  virtual void Submit() = 0;
  // Submits, and waits for all. Returns what went wrong since the last call, or "".
  virtual std::string Wait() = 0;
};

// Null on a machine without a GPU.
std::unique_ptr<Gpu> OpenGpu();

}  // namespace mlcpipe::metal

#endif  // MLCPIPE_METAL_GPU_H_
