
// The functions that tir_schedules/gpu/device_calls.py calls. All 32 threads of a SIMD group come to each call.
#define mlcpipe_subgroup_lane() ((int)(threadIdx.x % 32))
#define mlcpipe_subgroup_id() ((int)(threadIdx.x / 32))
#define mlcpipe_subgroup_add(a) simd_sum(a)
#define mlcpipe_subgroup_max(a) simd_max(a)
#define mlcpipe_subgroup_inclusive_add(a) simd_prefix_inclusive_sum(a)
#define mlcpipe_subgroup_exclusive_add(a) simd_prefix_exclusive_sum(a)
#define mlcpipe_subgroup_shuffle(a, lane) simd_shuffle(a, (ushort)(lane))
#define mlcpipe_subgroup_broadcast(a, lane) simd_broadcast(a, (ushort)(lane))
#define mlcpipe_subgroup_shuffle_xor(a, mask) simd_shuffle_xor(a, (ushort)(mask))
#define mlcpipe_require_subgroup_size(lanes) static_assert((lanes) == 32, "a SIMD group has 32 threads")
inline uint mlcpipe_half_pair(float low, float high) { return as_type<uint>(half2((half)low, (half)high)); }
// With fast arithmetic, `tanh` is a quotient of exponentials, which is NaN beyond 44.
#define tanh(x) precise::tanh((float)(x))

// SIMD group matrices, which kernels declare: `use` 0 and 1 are factors, 2 is an accumulator. A factor's rows, or columns,
// are `stride` words of two numbers apart. Only products of 8 x 8 by 8 x 8 exist (Metal Shading Language, 6.7).
#define mlcpipe_matrix_new(number, use, rows, columns)                                     \
  static_assert((rows) == 8 && (columns) == 8, "a matrix of a SIMD group is 8 x 8");       \
  simdgroup_matrix<mlcpipe_matrix_number<use>::type, columns, rows> mlcpipe_matrix_##number
#define mlcpipe_matrix_clear(number, use, rows, columns) \
  mlcpipe_matrix_##number = make_filled_simdgroup_matrix<float, columns, rows>(0.0f)
#define mlcpipe_matrix_load(number, use, rows, columns, words, stride, by_columns) \
  simdgroup_load(mlcpipe_matrix_##number, (const threadgroup half*)(words), 2 * (stride), 0, by_columns)
#define mlcpipe_matrix_multiply(total, u0, r0, c0, left, u1, r1, c1, right, u2, r2, c2) \
  simdgroup_multiply_accumulate(mlcpipe_matrix_##total, mlcpipe_matrix_##left, mlcpipe_matrix_##right, mlcpipe_matrix_##total)
#define mlcpipe_matrix_store(number, use, rows, columns, words, stride) \
  simdgroup_store(mlcpipe_matrix_##number, (threadgroup float*)(words), stride)
template <int use> struct mlcpipe_matrix_number { typedef half type; };
template <> struct mlcpipe_matrix_number<2> { typedef float type; };
