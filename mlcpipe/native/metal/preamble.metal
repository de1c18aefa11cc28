
// The functions that tir_schedules/gpu/device_calls.py calls. All 32 threads of a SIMD group come to each call.
#define mlcpipe_subgroup_size() 32
#define mlcpipe_subgroup_lane() ((int)(threadIdx.x % 32))
#define mlcpipe_subgroup_id() ((int)(threadIdx.x / 32))
#define mlcpipe_subgroup_add(a) simd_sum(a)
#define mlcpipe_subgroup_min(a) simd_min(a)
#define mlcpipe_subgroup_max(a) simd_max(a)
#define mlcpipe_subgroup_inclusive_add(a) simd_prefix_inclusive_sum(a)
#define mlcpipe_subgroup_exclusive_add(a) simd_prefix_exclusive_sum(a)
#define mlcpipe_subgroup_shuffle(a, lane) simd_shuffle(a, (ushort)(lane))
#define mlcpipe_subgroup_broadcast(a, lane) simd_broadcast(a, (ushort)(lane))
#define mlcpipe_subgroup_shuffle_xor(a, mask) simd_shuffle_xor(a, (ushort)(mask))
#define mlcpipe_subgroup_shuffle_up(a, delta) simd_shuffle_up(a, (ushort)(delta))
#define mlcpipe_subgroup_shuffle_down(a, delta) simd_shuffle_down(a, (ushort)(delta))
#define mlcpipe_subgroup_any(a) simd_any(a)
#define mlcpipe_subgroup_all(a) simd_all(a)
#define mlcpipe_require_subgroup_size(lanes) static_assert((lanes) == 32, "a SIMD group has 32 threads")
template <typename T>
inline T mlcpipe_subgroup_cluster_add(T a, int cluster) {
  for (int step = cluster / 2; step > 0; step /= 2) a = a + simd_shuffle_xor(a, (ushort)step);
  return a;
}
template <typename T>
inline T mlcpipe_subgroup_cluster_min(T a, int cluster) {
  for (int step = cluster / 2; step > 0; step /= 2) a = min(a, simd_shuffle_xor(a, (ushort)step));
  return a;
}
template <typename T>
inline T mlcpipe_subgroup_cluster_max(T a, int cluster) {
  for (int step = cluster / 2; step > 0; step /= 2) a = max(a, simd_shuffle_xor(a, (ushort)step));
  return a;
}

