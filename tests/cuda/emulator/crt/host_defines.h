// Words of NVIDIA's compiler that the headers of its libraries use; a host's compiler has no need of them.
#pragma once
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __host__
#define __device__
#define __inline__ inline
#define __forceinline__ inline
#define CUDARTAPI
#define CUDART_CB
#define CUDARTAPI_CDECL
