// Stands in for CUDA where generated kernels are compiled by a host's C++ compiler: each thread of a block is a fiber, a
// barrier or a warp's exchange runs on to the next one. `emulator.cc` runs blocks one after another.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

struct Index { unsigned x, y, z; };
extern "C" {
extern Index threadIdx, blockIdx, blockDim, gridDim;
void emulated_barrier(int line);
// Every lane of the warp gives 8 bytes; returns those of all 32, valid until the next exchange but one.
const uint64_t* emulated_exchange(uint64_t value, int line);
}

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ __attribute__((section("emulated_shared"))) static
// Generated code has it between other words of a declaration, where C++ has none.
#define alignas(n) __attribute__((aligned(n)))
#define __syncthreads() emulated_barrier(__LINE__)
#define __syncwarp(...) ((void)emulated_exchange(0, __LINE__))

typedef _Float16 half;
typedef half __half;


inline half __float2half_rn(float x) { return (half)x; }
inline float __half2float(half x) { return (float)x; }
inline bool __hgt(half a, half b) { return a > b; }
inline bool __hlt(half a, half b) { return a < b; }

// Vectors, by CUDA's names.
template <typename T, int Bytes>
struct alignas(Bytes) Vector2 { T x, y; };
template <typename T, int Bytes>
struct alignas(Bytes) Vector4 { T x, y, z, w; };
#define EMULATED_VECTORS(name, type)                                      \
  typedef Vector2<type, 2 * sizeof(type)> name##2;                        \
  typedef Vector4<type, 4 * sizeof(type)> name##4;                        \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }        \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(uint, unsigned)
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(longlong, long long)
typedef Vector2<half, 4> half2;
typedef half2 __half2;
inline half2 __floats2half2_rn(float x, float y) { return {(half)x, (half)y}; }
inline half emulated_fma(half a, half b, half c) { return (half)((double)a * b + c); }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {emulated_fma(a.x, b.x, c.x), emulated_fma(a.y, b.y, c.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {(half)((float)a.x * b.x), (half)((float)a.y * b.y)}; }
inline float __low2float(half2 a) { return (float)a.x; }
inline float __high2float(half2 a) { return (float)a.y; }

template <typename T>
uint64_t emulated_bits(T value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T emulated_value(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}
inline int emulated_lane() { return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32); }
template <typename T>
T emulated_shuffle(T a, int lane, bool inside, int line) {
  const uint64_t* all = emulated_exchange(emulated_bits(a), line);
  return inside ? emulated_value<T>(all[lane]) : a;
}
#define __shfl_sync(mask, a, lane) emulated_shuffle(a, (lane) & 31, true, __LINE__)
#define __shfl_xor_sync(mask, a, bits) emulated_shuffle(a, emulated_lane() ^ (bits), true, __LINE__)
#define __shfl_up_sync(mask, a, n) emulated_shuffle(a, emulated_lane() - (n), emulated_lane() >= (n), __LINE__)

// A warp's product of 16 x 16 by 16 x 8 numbers, lane by lane from the whole matrices, which its lanes' words make up as
// PTX ISA says of mma.m16n8k16: "Matrix Fragments", with groupID = lane / 4 and threadID_in_group = lane % 4.
inline int emulated_mma(float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, int line) {
  float a[16][16], b[16][8];
  auto number = [](uint64_t bits, int i) { return (float)emulated_value<half>(bits >> 16 * i & 0xffff); };
  const uint64_t* all = emulated_exchange(a0 | (uint64_t)a1 << 32, line);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) a[lane / 4 + (i < 2 ? 0 : 8)][lane % 4 * 2 + (i & 1)] = number(all[lane], i);
  all = emulated_exchange(a2 | (uint64_t)a3 << 32, line);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) a[lane / 4 + (i < 2 ? 0 : 8)][lane % 4 * 2 + (i & 1) + 8] = number(all[lane], i);
  all = emulated_exchange(b0 | (uint64_t)b1 << 32, line);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) b[lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8)][lane / 4] = number(all[lane], i);
  int lane = emulated_lane();
  for (int i = 0; i < 4; ++i) {
    int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
    for (int k = 0; k < 16; ++k) sums[i] += a[row][k] * b[k][column];
  }
  return 0;
}
#define MLCPIPE_EMULATED

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  unsigned found = 0;
  uint64_t all = (uint64_t)b << 32 | a;
  for (int i = 0; i < 4; ++i) found |= (unsigned)(all >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return found;
}

template <typename T>
T max(T a, T b) { return a > b ? a : b; }
template <typename T>
T min(T a, T b) { return a < b ? a : b; }
// As CUDA's, a number where one of the two is none.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __float_as_int(float x) { return emulated_value<int>(emulated_bits(x)); }
inline float __int_as_float(int x) { return emulated_value<float>(emulated_bits(x)); }

template <typename... A, size_t... I>
void emulated_call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(A*)arguments[I]...);
}
template <typename... A>
void emulated_call(void (*kernel)(A...), void** arguments) {
  emulated_call(kernel, arguments, std::index_sequence_for<A...>());
}
// Arguments that outlive a launch, for graphs.
template <typename... A, size_t... I>
void** emulated_kept(void (*)(A...), void** arguments, std::index_sequence<I...>) {
  return new void*[sizeof...(A) + 1]{new A(*(A*)arguments[I])...};
}
template <typename... A>
void** emulated_kept(void (*kernel)(A...), void** arguments) {
  return emulated_kept(kernel, arguments, std::index_sequence_for<A...>());
}
// After the source, for each kernel: what the driver calls for one thread, what keeps the arguments of a launch, and
// whether threads wait for one another.
#define EMULATED_KERNEL(name, waits)                                                    \
  extern "C" void emulated_##name(void** arguments) { emulated_call(&name, arguments); } \
  extern "C" void** emulated_kept_##name(void** arguments) { return emulated_kept(&name, arguments); } \
  extern "C" int emulated_waits_##name = waits;
#define EMULATED_MODULE                                                                                \
  extern "C" char __start_emulated_shared[] __attribute__((weak)), __stop_emulated_shared[] __attribute__((weak)); \
  extern "C" void emulated_forget() {                                                                  \
    if (__start_emulated_shared) memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared); \
  }

// The preamble of the kernels names these types; CUDA's 64 bits are `long long`.
#define int64_t cuda_int64_t
#define uint64_t cuda_uint64_t
