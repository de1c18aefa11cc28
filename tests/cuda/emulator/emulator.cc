// The part of CUDA's driver and runtime libraries that TVM's CUDA runtime calls, on the CPU: memory is the host's, streams
// are in order by nature, a module is a shared library of kernels whose threads are fibers.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <setjmp.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

struct Index { unsigned x, y, z; };
extern "C" {
__attribute__((visibility("default"))) Index threadIdx, blockIdx, blockDim, gridDim;
}

namespace {

constexpr size_t kStack = 64 << 10;
constexpr size_t kMemory = size_t(8) << 30;
enum State { kReady, kAtBarrier, kInExchange, kEnded };

struct Fiber {
  void* stack = nullptr;  // where its registers lie while it does not run
  char* memory = nullptr;
  State state = kEnded;
  int line = 0;
  Index index{};
};
struct Warp {
  uint64_t slots[2][32];
  int round[32] = {};
};
struct Function {
  std::string name;
  void (*call)(void**);
  bool waits;
  void (*forget)();
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
size_t current, threads;
void* scheduler;
Function* running;
void** parameters;
size_t allocated;
std::map<void*, size_t> blocks;

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "emulated CUDA: %s in %s, block (%u, %u)\n", what, running ? running->name.c_str() : "no kernel",
          blockIdx.x, blockIdx.y);
  for (size_t i = 0; i < threads && i < 64; ++i) {
    const char* words[] = {"ready", "at a barrier", "in an exchange", "ended"};
    fprintf(stderr, "  thread %zu %s, line %d\n", i, words[fibers[i].state], fibers[i].line);
  }
  abort();
}

// Keeps the callee's registers on this stack, its pointer in *from, and goes on with the other stack.
extern "C" void emulated_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.globl emulated_switch
.hidden emulated_switch
emulated_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
#else
#error "the emulator switches fibers on x86-64 only"
#endif

void leave(State state, int line) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  fiber.line = line;
  emulated_switch(&fiber.stack, scheduler);
  threadIdx = fibers[current].index;
}

void body() {
  threadIdx = fibers[current].index;
  running->call(parameters);
  leave(kEnded, 0);
  abort();
}

void begin(Fiber& fiber) {
  if (!fiber.memory) fiber.memory = (char*)mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void** top = (void**)(fiber.memory + kStack - 64);
  *--top = nullptr;         // where `body` would return to; keeps the stack as calls have it
  *--top = (void*)&body;
  top -= 6;                 // registers
  memset(top, 0, 6 * sizeof(void*));
  fiber.stack = top;
  fiber.state = kReady;
}

void run_block() {
  for (size_t i = 0; i < threads; ++i) begin(fibers[i]);
  for (auto& warp : warps) memset(warp.round, 0, sizeof warp.round);
  for (;;) {
    size_t ended = 0, waiting = 0, ran = 0;
    for (current = 0; current < threads; ++current) {
      if (fibers[current].state != kReady) continue;
      emulated_switch(&scheduler, fibers[current].stack);
      ++ran;
    }
    for (size_t i = 0; i < threads; ++i) {
      ended += fibers[i].state == kEnded;
      waiting += fibers[i].state == kAtBarrier;
    }
    if (ended == threads) return;
    bool released = false;
    if (ended + waiting == threads) {
      for (size_t i = 0; i < threads; ++i) if (fibers[i].state == kAtBarrier) fibers[i].state = kReady;
      continue;
    }
    for (size_t first = 0; first < threads; first += 32) {
      size_t there = 0;
      for (size_t i = first; i < first + 32 && i < threads; ++i) there += fibers[i].state == kInExchange;
      if (there != 32) continue;
      for (size_t i = first; i < first + 32; ++i) fibers[i].state = kReady;
      released = true;
    }
    if (!released && !ran) fail("threads wait for others that do not come");
  }
}

void launch(Function& function, void** arguments) {
  running = &function;
  parameters = arguments;
  threads = size_t(blockDim.x) * blockDim.y * blockDim.z;
  if (fibers.size() < threads) fibers.resize(threads);
  if (warps.size() < threads / 32 + 1) warps.resize(threads / 32 + 1);
  for (size_t i = 0; i < threads; ++i)
    fibers[i].index = {unsigned(i % blockDim.x), unsigned(i / blockDim.x % blockDim.y), unsigned(i / blockDim.x / blockDim.y)};
  if (function.forget) function.forget();
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        if (function.waits) {
          run_block();
          continue;
        }
        for (size_t i = 0; i < threads; ++i) {
          threadIdx = fibers[i].index;
          function.call(arguments);
        }
      }
  running = nullptr;
}

}  // namespace

extern "C" {

void emulated_barrier(int line) { leave(kAtBarrier, line); }

const uint64_t* emulated_exchange(uint64_t value, int line) {
  Warp& warp = warps[current / 32];
  int lane = int(current % 32), round = warp.round[lane]++ & 1;
  warp.slots[round][lane] = value;
  leave(kInExchange, line);
  return warp.slots[round];
}

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
