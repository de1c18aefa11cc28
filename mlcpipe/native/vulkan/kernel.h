// A kernel and its interface; the file format of modules.
//
//   u64 little-endian: bytes of the header; the header, JSON padded with spaces to a multiple of 8; SPIR-V at offsets from
//   the header's end. {"format": 1, "kernels": [KERNEL, ...]}, KERNEL:
//     name            global symbol          entry            name of the OpEntryPoint
//     spirv_offset    multiple of 4          spirv_bytes
//     buffers         [{"arg": position among the arguments, "write": bool, "dtype": text}], binding i of set 0
//     scalars         [{"arg", "dtype": the argument's type, "stored": its type in the push constants, "offset": there}]
//     push_constant_bytes, workgroup [x, y, z], shared_bytes, subgroup_size (0: any), full_subgroups (may lack)
//     launch_params   ["blockIdx.x", ..., "threadIdx.z"]: the extents that follow the arguments, in this order
//     grid_base       {"offset": push constant with the first workgroup in x of a dispatch}, or null: then a launch
//                     of more workgroups in x than the device allows is refused, else it becomes several dispatches
//     features        names that Adapter::known_features() has
#ifndef MLCPIPE_VULKAN_KERNEL_H_
#define MLCPIPE_VULKAN_KERNEL_H_

#include <cstdint>
#include <string>
#include <vector>

namespace mlcpipe::vulkan {

// Devices must support 128; no known device supports more than this.
inline constexpr int kMaxPushBytes = 256;

// Types of push constants; narrower types are widened.
enum class ScalarType : uint8_t { kI32, kU32, kI64, kU64, kF32, kF64 };

struct BufferArgument {
  uint32_t position;
  bool write;
};

struct ScalarArgument {
  uint32_t position;
  ScalarType type;
  uint32_t offset;
};

struct Kernel {
  std::string name, entry;
  const uint32_t* code = nullptr;
  size_t code_bytes = 0;
  std::vector<BufferArgument> buffers;
  std::vector<ScalarArgument> scalars;
  uint32_t argument_count = 0;
  uint32_t push_bytes = 0;
  uint32_t workgroup[3] = {1, 1, 1};
  uint32_t shared_bytes = 0;
  uint32_t subgroup_size = 0;
  bool full_subgroups = false;
  std::vector<uint8_t> launch;  // 0..2 blockIdx, 3..5 threadIdx
  int32_t grid_base_offset = -1;
  std::vector<std::string> features;
};

// Bytes of a scalar in the push constants.
uint32_t ScalarBytes(ScalarType type);

// Reads a module. `bytes` must outlive the kernels, which point into it, and be aligned to 8. Raises on any
// inconsistency: sizes, offsets, positions, names, the structure of the SPIR-V.
std::vector<Kernel> ReadKernels(const char* bytes, size_t size);

// Why `words` are not a SPIR-V module of version 1.6 or older with the compute entry point `entry`, or "". Instructions
// must lie inside the module; the driver checks what they mean.
std::string FindSpirvProblem(const uint32_t* words, size_t count, const std::string& entry);

}  // namespace mlcpipe::vulkan

#endif  // MLCPIPE_VULKAN_KERNEL_H_
