// TVM's type names, and the functions that tir_schedules/gpu/device_calls.py calls. Kernels are launched with whole
// warps of 32 consecutive threads in x.
#include <cuda_fp16.h>

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;

// Four 16-bit numbers, which TVM loads and stores at once.
struct alignas(8) half4 {
  half x, y, z, w;
};
__device__ inline half4 make_half4(half x, half y, half z, half w) { return half4{x, y, z, w}; }

__device__ inline half max(half a, half b) { return __hgt(a, b) ? a : b; }
__device__ inline half min(half a, half b) { return __hlt(a, b) ? a : b; }

// Every lane of a warp must reach each of these calls; otherwise behaviour is undefined.
#define MLCPIPE_WARP 0xffffffffu

// All lanes get the same bits, because both operations are commutative.
#define MLCPIPE_REDUCED(name, combined)              \
  template <typename T>                              \
  __device__ inline T mlcpipe_subgroup_##name(T a) { \
    for (int step = 16; step > 0; step /= 2) {       \
      T b = __shfl_xor_sync(MLCPIPE_WARP, a, step);  \
      a = combined;                                  \
    }                                                \
    return a;                                        \
  }
MLCPIPE_REDUCED(add, a + b)
MLCPIPE_REDUCED(max, (b > a ? b : a))
#undef MLCPIPE_REDUCED

__device__ inline int mlcpipe_subgroup_lane() { return (int)(threadIdx.x & 31); }
__device__ inline int mlcpipe_subgroup_id() { return (int)(threadIdx.x >> 5); }

template <typename T>
__device__ inline T mlcpipe_subgroup_inclusive_add(T a) {
  for (int step = 1; step < 32; step *= 2) {
    T b = __shfl_up_sync(MLCPIPE_WARP, a, step);
    if (mlcpipe_subgroup_lane() >= step) a = a + b;
  }
  return a;
}
template <typename T>
__device__ inline T mlcpipe_subgroup_exclusive_add(T a) {
  T before = __shfl_up_sync(MLCPIPE_WARP, mlcpipe_subgroup_inclusive_add(a), 1);
  return mlcpipe_subgroup_lane() == 0 ? T(0) : before;
}
template <typename T>
__device__ inline T mlcpipe_subgroup_shuffle(T a, int lane) {
  return __shfl_sync(MLCPIPE_WARP, a, lane);
}
template <typename T>
__device__ inline T mlcpipe_subgroup_broadcast(T a, int lane) {
  return __shfl_sync(MLCPIPE_WARP, a, lane);
}
template <typename T>
__device__ inline T mlcpipe_subgroup_shuffle_xor(T a, int mask) {
  return __shfl_xor_sync(MLCPIPE_WARP, a, mask);
}
// Warps have 32 lanes. Another size does not compile: the array's length would be negative.
#define mlcpipe_require_subgroup_size(lanes) ((void)sizeof(char[(lanes) == 32 ? 1 : -1]))

__device__ inline uint mlcpipe_half_pair(float low, float high) {
  half2 pair = __floats2half2_rn(low, high);
  return *(uint*)&pair;
}

__device__ inline uint mlcpipe_low_halves(uint low, uint high) { return __byte_perm(low, high, 0x5410); }
__device__ inline uint mlcpipe_high_halves(uint low, uint high) { return __byte_perm(low, high, 0x7632); }
__device__ inline uint mlcpipe_permute_bytes(uint low, uint high, uint which) { return __byte_perm(low, high, which); }

__device__ inline half2 mlcpipe_halves(uint word) { return *(half2*)&word; }
__device__ inline uint mlcpipe_half_fma(uint a, uint b, uint c) {
  half2 pair = __hfma2(mlcpipe_halves(a), mlcpipe_halves(b), mlcpipe_halves(c));
  return *(uint*)&pair;
}
__device__ inline uint mlcpipe_half_multiply(uint a, uint b) {
  half2 pair = __hmul2(mlcpipe_halves(a), mlcpipe_halves(b));
  return *(uint*)&pair;
}
__device__ inline float mlcpipe_low_half(uint word) { return __low2float(mlcpipe_halves(word)); }
__device__ inline float mlcpipe_high_half(uint word) { return __high2float(mlcpipe_halves(word)); }

// (word & mask) | bits: the compiler takes two instructions for it where both are constants.
__device__ inline uint mlcpipe_set_bits(uint word, uint mask, uint bits) {
#ifdef MLCPIPE_EMULATED
  return (word & mask) | bits;
#else
  uint result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
#endif
}

// See passes/overlap_launches.py: the next kernel may start, and this one goes on when all earlier ones have finished.
#if !defined(MLCPIPE_EMULATED) && __CUDA_ARCH__ >= 900
#define mlcpipe_wait_for_earlier() asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory")
#else
#define mlcpipe_wait_for_earlier() ((void)0)
#endif

// What the assembler is told: see nvrtc/source.py.
#define mlcpipe_resident(threads) ((void)0)

// 16 bytes at a time: PTX ISA, cp.async. Turing has none.
#if !defined(MLCPIPE_EMULATED) && __CUDA_ARCH__ >= 800
__device__ inline void mlcpipe_copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
#define mlcpipe_copies_commit() asm volatile("cp.async.commit_group;" ::: "memory")
#define mlcpipe_copies_wait(groups) asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory")
#else
__device__ inline void mlcpipe_copy_async(void* to, const void* from) { *(uint4*)to = *(const uint4*)from; }
#define mlcpipe_copies_commit() ((void)0)
#define mlcpipe_copies_wait(groups) ((void)0)
#endif

// sums = start + a b, by a warp: PTX ISA, mma.m16n8k16; Turing has mma.m16n8k8.
#ifdef MLCPIPE_EMULATED
#define mlcpipe_mma(sums, a0, a1, a2, a3, b0, b1) emulated_mma(sums, a0, a1, a2, a3, b0, b1, __LINE__)
#define mlcpipe_mma_from(sums, start, a0, a1, a2, a3, b0, b1) \
  (__builtin_memcpy(sums, start, 16), emulated_mma(sums, a0, a1, a2, a3, b0, b1, __LINE__))
#else
__device__ inline int mlcpipe_mma_from(float* sums, const float* start, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
#else
  float half[4];
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=f"(half[0]), "=f"(half[1]), "=f"(half[2]), "=f"(half[3])
      : "r"(a0), "r"(a1), "r"(b0), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a2), "r"(a3), "r"(b1), "f"(half[0]), "f"(half[1]), "f"(half[2]), "f"(half[3]));
#endif
  return 0;
}
#define mlcpipe_mma(sums, a0, a1, a2, a3, b0, b1) mlcpipe_mma_from(sums, sums, a0, a1, a2, a3, b0, b1)
#endif
