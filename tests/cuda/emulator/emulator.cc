// The part of CUDA's driver and runtime libraries that TVM's CUDA runtime calls, on the CPU: memory is the host's, streams
// are in order by nature, a module is a shared library of kernels whose threads are fibers.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <map>

#include "../../emulator/fibers.h"

namespace {
constexpr size_t kMemory = size_t(8) << 30;
size_t allocated;
std::map<void*, size_t> blocks;
}  // namespace

extern "C" {

// The driver.
CUresult cuDeviceGetName(char* name, int length, CUdevice) { snprintf(name, length, "emulated GPU"); return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** text) { *text = "CUDA_ERROR_OF_EMULATOR"; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { *text = "an error of the emulator"; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) { return CUDA_ERROR_NOT_SUPPORTED; }

// What the tests' compiler makes: "emulated:" and the path of a shared library.
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const char* text = (const char*)image;
  if (strncmp(text, "emulated:", 9)) return CUDA_ERROR_INVALID_IMAGE;
  void* library = dlopen(text + 9, RTLD_NOW | RTLD_LOCAL);
  if (!library) { fprintf(stderr, "emulated CUDA: %s\n", dlerror()); return CUDA_ERROR_INVALID_IMAGE; }
  *module = (CUmodule)library;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  std::string text(name);
  void* call = dlsym((void*)module, ("emulated_" + text).c_str());
  int* waits = (int*)dlsym((void*)module, ("emulated_waits_" + text).c_str());
  if (!call || !waits) return CUDA_ERROR_NOT_FOUND;
  auto* found = new Function{text, (void (*)(void**))call, *waits != 0, (void (*)())dlsym((void*)module, "emulated_forget")};
  *function = (CUfunction)found;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  if (config->blockDimX * config->blockDimY * config->blockDimZ > 1024 || config->gridDimY > 65535 ||
      config->gridDimZ > 65535 || !config->gridDimX || !config->gridDimY) return CUDA_ERROR_INVALID_VALUE;
  blockDim = {config->blockDimX, config->blockDimY, config->blockDimZ};
  gridDim = {config->gridDimX, config->gridDimY, config->gridDimZ};
  launch(*(Function*)function, arguments);
  return CUDA_SUCCESS;
}

// The runtime library.
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 2; break;
    default: *value = 1024;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = kMemory;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfEmulator"; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "an error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { *free = kMemory - allocated; *total = kMemory; return cudaSuccess; }
cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (allocated + size > kMemory) return cudaErrorMemoryAllocation;
  *pointer = aligned_alloc(256, (size + 511) / 256 * 256);
  memset(*pointer, 0xff, size);  // not a number: nobody may count on zeros
  blocks[*pointer] = size;
  allocated += size;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  auto found = blocks.find(pointer);
  if (found == blocks.end()) return pointer ? cudaErrorInvalidValue : cudaSuccess;
  allocated -= found->second;
  blocks.erase(found);
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t size) { *pointer = aligned_alloc(64, (size + 63) / 64 * 64); return cudaSuccess; }
cudaError_t cudaFreeHost(void* pointer) { free(pointer); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) {
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { *stream = (cudaStream_t)malloc(1); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { *event = (cudaEvent_t)malloc(1); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { *milliseconds = 0; return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
}
