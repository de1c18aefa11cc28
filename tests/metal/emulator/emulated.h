// Metal's standard library for kernels that run on the host: what `../msl/metal_stdlib` declares, with bodies. Each thread
// is a fiber of `../../emulator/fibers.h`; SIMD groups are 32 threads in a row.
#pragma once
#include "../msl/metal_stdlib"

struct Index { unsigned x, y, z; };
extern "C" {
extern Index threadIdx, blockIdx;
void emulated_barrier(int line);
const ulong* emulated_exchange(ulong value, int line);  // valid until the next but one
int emulated_lane();
void* memset(void*, int, ulong);
}

template <typename T>
inline ulong emulated_bits(T value) {
  static_assert(sizeof(T) <= 8, "more than 8 bytes");
  ulong bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
inline T emulated_value(ulong bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

namespace metal {
inline void threadgroup_barrier(mem_flags) { emulated_barrier(0); }
inline void simdgroup_barrier(mem_flags) { emulated_exchange(0, 0); }
template <typename T>
T select(T otherwise, T chosen, bool condition) {
  return condition ? chosen : otherwise;
}

#define EMULATED(name)                                         \
  inline float name(float x) { return __builtin_##name##f(x); } \
  inline half name(half x) { return (half)__builtin_##name##f((float)x); }
EMULATED(exp) EMULATED(exp2) EMULATED(log) EMULATED(log2) EMULATED(sqrt) EMULATED(fabs) EMULATED(floor)
EMULATED(ceil) EMULATED(round) EMULATED(trunc)
inline float rsqrt(float x) { return 1 / __builtin_sqrtf(x); }
inline half rsqrt(half x) { return (half)rsqrt((float)x); }
// Fast arithmetic, which TVM's runtime asks for: a quotient of powers of e, none where they are infinite.
inline float tanh(float x) {
  float square = __builtin_expf(2 * x);
  return (square - 1) / (square + 1);
}
inline half tanh(half x) { return (half)tanh((float)x); }
namespace precise {
EMULATED(sin) EMULATED(cos) EMULATED(tanh)
}
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline half max(half a, half b) { return (half)__builtin_fmaxf((float)a, (float)b); }
inline half min(half a, half b) { return (half)__builtin_fminf((float)a, (float)b); }
#define EMULATED_INTEGERS(type)                          \
  inline type max(type a, type b) { return a > b ? a : b; } \
  inline type min(type a, type b) { return a < b ? a : b; }
EMULATED_INTEGERS(int) EMULATED_INTEGERS(uint) EMULATED_INTEGERS(long)
inline int abs(int x) { return x < 0 ? -x : x; }
inline uint popcount(uint x) { return (uint)__builtin_popcount(x); }

// A lane that does not exist gives no number: what Metal gives is undefined.
template <typename T>
T emulated_shuffle(T a, int lane) {
  const ulong* all = emulated_exchange(emulated_bits(a), 0);
  return emulated_value<T>(lane >= 0 && lane < 32 ? all[lane] : ~(ulong)0);
}
template <typename T, typename F>
T emulated_reduced(T a, int begin, int end, T found, F combine) {
  const ulong* all = emulated_exchange(emulated_bits(a), 0);
  for (int i = begin; i < end; ++i) found = i == 0 && begin == 0 && end == 32 ? emulated_value<T>(all[0]) : combine(found, emulated_value<T>(all[i]));
  return found;
}
#define EMULATED_SIMD(type)                                                                                            \
  inline type simd_sum(type a) { return emulated_reduced(a, 0, 32, (type)0, [](type x, type y) { return (type)(x + y); }); } \
  inline type simd_max(type a) { return emulated_reduced(a, 0, 32, a, [](type x, type y) { return max(x, y); }); }        \
  inline type simd_prefix_inclusive_sum(type a) {                                                                      \
    return emulated_reduced(a, 0, emulated_lane() + 1, (type)0, [](type x, type y) { return (type)(x + y); });          \
  }                                                                                                                    \
  inline type simd_prefix_exclusive_sum(type a) {                                                                      \
    return emulated_reduced(a, 0, emulated_lane(), (type)0, [](type x, type y) { return (type)(x + y); });              \
  }                                                                                                                    \
  inline type simd_shuffle(type a, ushort lane) { return emulated_shuffle(a, lane); }                                   \
  inline type simd_broadcast(type a, ushort lane) { return emulated_shuffle(a, lane); }                                 \
  inline type simd_shuffle_xor(type a, ushort mask) { return emulated_shuffle(a, emulated_lane() ^ mask); }           \
  inline type simd_shuffle_down(type a, ushort lanes) { return emulated_shuffle(a, emulated_lane() + lanes); }
EMULATED_SIMD(float) EMULATED_SIMD(half) EMULATED_SIMD(int) EMULATED_SIMD(uint)

// A lane has two neighbours of a row: lane / 4 is the row, lane % 4 * 2 the column. Kernels cannot know.
template <typename T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  return {{value, value}};
}
template <typename T>
T& emulated_place(T* memory, ulong line, bool transposed, int i) {
  int row = emulated_lane() / 4, column = emulated_lane() % 4 * 2 + i;
  return transposed ? memory[column * line + row] : memory[row * line + column];
}
template <typename T>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const T* from, ulong line, ulong2 origin, bool transposed) {
  emulated_exchange(0, 0);  // all threads of the group come here
  for (int i = 0; i < 2; ++i) to.elements[i] = emulated_place(from + origin.y * line + origin.x, line, transposed, i);
}
template <typename T>
void simdgroup_store(const simdgroup_matrix<T, 8, 8>& from, T* to, ulong line, ulong2 origin, bool transposed) {
  emulated_exchange(0, 0);
  for (int i = 0; i < 2; ++i) emulated_place(to + origin.y * line + origin.x, line, transposed, i) = from.elements[i];
}
template <typename T, typename A, typename B>
void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& sum, const simdgroup_matrix<A, 8, 8>& left,
                                   const simdgroup_matrix<B, 8, 8>& right, const simdgroup_matrix<T, 8, 8>& added) {
  struct Pair { float x, y; };
  float numbers[2][64];
  for (int side = 0; side < 2; ++side) {
    Pair own = side ? Pair{(float)right.elements[0], (float)right.elements[1]}
                    : Pair{(float)left.elements[0], (float)left.elements[1]};
    const ulong* all = emulated_exchange(emulated_bits(own), 0);
    __builtin_memcpy(numbers[side], all, sizeof numbers[side]);
  }
  for (int i = 0; i < 2; ++i) {
    int row = emulated_lane() / 4, column = emulated_lane() % 4 * 2 + i;
    float total = (float)added.elements[i];
    for (int k = 0; k < 8; ++k) total += numbers[0][8 * row + k] * numbers[1][8 * k + column];
    sum.elements[i] = (T)total;
  }
}
}  // namespace metal

// How one thread calls a kernel: `arguments` are pointers, then a struct of numbers; the last two parameters are indices.
inline void emulated_index(const Index& from, uint& to) { to = from.x; }
inline void emulated_index(const Index& from, uint2& to) { to = uint2{from.x, from.y}; }
inline void emulated_index(const Index& from, uint3& to) { to = uint3{from.x, from.y, from.z}; }
template <typename T>
struct Argument {
  static T of(void** arguments, int) { T to; emulated_index(arguments ? blockIdx : threadIdx, to); return to; }
};
template <typename T>
struct Argument<T*> {
  static T* of(void** arguments, int i) { return (T*)arguments[i]; }
};
template <typename T>
struct Argument<T&> {
  static T& of(void** arguments, int i) { return *(T*)arguments[i]; }
};
template <typename T, T... I> struct Indices {};
template <typename... A, int... I>
void emulated_call(void (*function)(A...), void** arguments, Indices<int, I...>) {
  function(Argument<A>::of(I + 1 == sizeof...(A) ? nullptr : arguments, I)...);
}
template <typename... A>
void emulated_call(void (*function)(A...), void** arguments) {
  emulated_call(function, arguments, __make_integer_seq<Indices, int, sizeof...(A)>());
}
#define EMULATED_KERNEL(space, name, waits)                                                     \
  extern "C" void emulated_##name(void** arguments) { emulated_call(&space::name, arguments); } \
  extern "C" const int emulated_waits_##name = waits;
extern "C" char __start_emulated_shared[] __attribute__((weak)), __stop_emulated_shared[] __attribute__((weak));
extern "C" inline __attribute__((used)) void emulated_forget() {
  if (__start_emulated_shared) memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
}
