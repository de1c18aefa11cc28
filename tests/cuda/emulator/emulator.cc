// The part of CUDA's driver and runtime libraries that is called here, on the CPU: memory is the host's, streams are in
// order by nature, a module is a shared library of kernels whose threads are fibers, a graph a list of launches.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <map>

#include "../../emulator/fibers.h"

namespace {
constexpr size_t kMemory = size_t(8) << 30;
struct Kernel : Function {
  void** (*kept)(void**);
};
struct Launch {
  Kernel* kernel;
  Index grid, block;
  void** arguments;
};
using Graph = std::vector<Launch>;
struct Stream {
  Graph* recorded = nullptr;  // while it records
  bool invalid = false;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
};

size_t allocated;
std::map<void*, size_t> blocks;
// What tests ask for: launches of graphs, of kernels by themselves, of kernels in graphs, recordings, updates.
enum Count { kGraphs, kAlone, kInGraphs, kRecorded, kUpdated };
long counts[5];
int failing;  // recordings that shall fail
Stream* recording;

// What a stream that records cannot do makes its graph invalid.
cudaError_t refuse(cudaStream_t stream, cudaError_t error) {
  if (!stream || !((Stream*)stream)->recorded) return cudaSuccess;
  ((Stream*)stream)->invalid = true;
  return error;
}
// Nor can a thread that records free or take memory, or wait, unless its mode is relaxed.
cudaError_t refuse_unsafe() {
  if (!recording || recording->mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  recording->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}
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
  auto* forget = (void (*)())dlsym((void*)module, "emulated_forget");
  auto* kept = (void** (*)(void**))dlsym((void*)module, ("emulated_kept_" + text).c_str());
  auto* found = new Kernel{{text, (void (*)(void**))call, *waits != 0, forget}, kept};
  *function = (CUfunction)found;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  if (config->blockDimX * config->blockDimY * config->blockDimZ > 1024 || config->gridDimY > 65535 ||
      config->gridDimZ > 65535 || !config->gridDimX || !config->gridDimY) return CUDA_ERROR_INVALID_VALUE;
  Index block = {config->blockDimX, config->blockDimY, config->blockDimZ};
  Index grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
  auto* kernel = (Kernel*)function;
  if (auto* stream = (Stream*)config->hStream; stream && stream->recorded) {
    if (stream->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->recorded->push_back({kernel, grid, block, kernel->kept(arguments)});
    return CUDA_SUCCESS;
  }
  ++counts[kAlone];
  blockDim = block;
  gridDim = grid;
  launch(*kernel, arguments);
  return CUDA_SUCCESS;
}
long emulated_count(int which) { return counts[which]; }
void emulated_fail_recordings(int count) { failing = count; }

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
  if (auto error = refuse_unsafe()) return error;
  if (allocated + size > kMemory) return cudaErrorMemoryAllocation;
  *pointer = aligned_alloc(256, (size + 511) / 256 * 256);
  memset(*pointer, 0xff, size);  // not a number: nobody may count on zeros
  blocks[*pointer] = size;
  allocated += size;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (auto error = refuse_unsafe()) return error;
  auto found = blocks.find(pointer);
  if (found == blocks.end()) return pointer ? cudaErrorInvalidValue : cudaSuccess;
  allocated -= found->second;
  memset(pointer, 0xff, found->second);  // who reads it still gets no numbers
  blocks.erase(found);
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t size) { *pointer = aligned_alloc(64, (size + 63) / 64 * 64); return cudaSuccess; }
cudaError_t cudaFreeHost(void* pointer) { free(pointer); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  if (auto error = refuse(stream, cudaErrorStreamCaptureUnsupported)) return error;
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) {
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { *stream = (cudaStream_t)new Stream; return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { delete (Stream*)stream; return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return refuse(stream, cudaErrorStreamCaptureUnsupported); }
// Of an event that another stream recorded, which is all that happens here.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) { return refuse(stream, cudaErrorStreamCaptureIsolation); }
cudaError_t cudaEventCreate(cudaEvent_t* event) { *event = (cudaEvent_t)malloc(1); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { *milliseconds = 0; return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (!stream || ((Stream*)stream)->recorded) return cudaErrorStreamCaptureUnsupported;
  recording = (Stream*)stream;
  *recording = {new Graph, failing > 0 && failing-- > 0, mode};
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  auto& ended = *(Stream*)stream;
  recording = nullptr;
  *graph = nullptr;
  if (!ended.recorded) return cudaErrorIllegalState;
  if (ended.invalid) delete ended.recorded;
  else *graph = (cudaGraph_t)ended.recorded, ++counts[kRecorded];
  ended.recorded = nullptr;
  return ended.invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = (cudaGraphExec_t) new Graph(*(Graph*)graph);
  return cudaSuccess;
}
// A graph that launches the same kernels in the same order may have other arguments and grids.
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t made, cudaGraph_t graph, cudaGraphExecUpdateResultInfo* information) {
  auto &old = *(Graph*)made, &now = *(Graph*)graph;
  bool same = old.size() == now.size();
  for (size_t i = 0; same && i < now.size(); ++i) same = old[i].kernel == now[i].kernel;
  memset(information, 0, sizeof *information);
  information->result = same ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
  if (!same) return cudaErrorGraphExecUpdateFailure;
  old = now;
  ++counts[kUpdated];
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t) {
  ++counts[kGraphs];
  for (auto& one : *(Graph*)made) {
    ++counts[kInGraphs];
    blockDim = one.block;
    gridDim = one.grid;
    launch(*one.kernel, one.arguments);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete (Graph*)graph; return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made) { delete (Graph*)made; return cudaSuccess; }
}
