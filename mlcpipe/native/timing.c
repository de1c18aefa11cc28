/* Times two kernels on a machine that has nothing but Linux: linked statically with the kernels, with pool.c, and with
 * the arguments.h that mlcpipe/tuning/remote.py writes. What the tensors hold lies behind the end of this program's
 * file, in order; of a long tensor only a period of its bytes.
 *
 * Prints one line of JSON, as mlcpipe/tuning/remote.py reads it:
 *   {"apart": [[largest difference, largest number], ...], "pairs": [[seconds, seconds], ...]}
 * how far the kernels' outputs are apart, one entry for each output, and seconds of a call of each, measured in turn.
 */
#define _GNU_SOURCE
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <tvm/ffi/c_api.h>

typedef struct {
  TVMFFIAny value; /* of a number; a tensor's type index is kTVMFFIDLTensorPtr */
  DLDataType dtype;
  int ndim;
  int64_t shape[8];
  size_t nbytes, period;
  int output; /* whose bytes are float32 numbers */
} Argument;

/* Arguments `arguments`, and the numbers ARGUMENTS, COPIES, PAIRS, HALF_NS, LIMIT_S, CONTENT_BYTES. */
#include "arguments.h"

int __tvm_ffi_kernel_default(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
int __tvm_ffi_kernel_candidate(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
int __tvm_ffi_mlcpipe_threads(void*, const TVMFFIAny*, int32_t, TVMFFIAny*); /* pool.c */

enum { ALIGNMENT = 64, KEPT = 16 };
static DLTensor views[COPIES][ARGUMENTS];
static TVMFFIAny values[COPIES][ARGUMENTS];

static void fail(const char* words) {
  fprintf(stderr, "%s\n", words);
  exit(1);
}

static void* allocate(size_t nbytes) {
  void* found = aligned_alloc(ALIGNMENT, (nbytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
  if (found == NULL) fail("not enough memory");
  return found;
}

/* The functions of TVM's runtime that kernels call (tvm/runtime/c_backend_api.h). */
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* words) { fprintf(stderr, "%s: %s\n", kind, words); }

void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  fprintf(stderr, "%s: ", kind);
  for (int32_t i = 0; i < count; i++) fputs(parts[i] ? parts[i] : "", stderr);
  fputs("\n", stderr);
}

/* As TVM's: a thread keeps what it frees, so that no call waits for the system's memory. */
static _Thread_local struct {
  void* memory;
  uint64_t nbytes;
  int used;
} kept[KEPT];

static void* alloc_workspace(int device, int id, uint64_t nbytes, int code, int bits) {
  (void)device, (void)id, (void)code, (void)bits;
  for (int i = 0; i < KEPT; i++) {
    if (kept[i].used || (kept[i].memory != NULL && kept[i].nbytes < nbytes)) continue;
    if (kept[i].memory == NULL) kept[i].memory = allocate(kept[i].nbytes = nbytes);
    kept[i].used = 1;
    return kept[i].memory;
  }
  return NULL;
}

static int free_workspace(int device, int id, void* memory) {
  (void)device, (void)id;
  for (int i = 0; i < KEPT; i++) {
    if (kept[i].memory == memory) kept[i].used = 0;
  }
  return 0;
}

typedef struct {
  void* sync_handle;
  int32_t num_task;
} Group;

static int launch(int (*body)(int, Group*, void*), void* closure, int num_task) {
  Group group = {NULL, num_task ? num_task : 1};
  for (int i = 0; i < group.num_task; i++) {
    if (body(i, &group, closure)) return 1;
  }
  return 0;
}

/* pool.c puts its own in the place of the first. */
void *__TVMBackendParallelLaunch = (void*)launch, *__TVMBackendAllocWorkspace = (void*)alloc_workspace,
     *__TVMBackendFreeWorkspace = (void*)free_workspace;

/* Physical cores: processors that are the first of their core, as Linux lists them. */
static int cores(void) {
  int count = 0, processors = (int)sysconf(_SC_NPROCESSORS_ONLN);
  for (int i = 0, first = i; i < processors; i++, first = i) {
    char path[80];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", i);
    FILE* file = fopen(path, "r");
    if (file != NULL) {
      if (fscanf(file, "%d", &first) != 1) first = i;
      fclose(file);
    }
    count += first == i;
  }
  return count ? count : 1;
}

static void read_arguments(const char* program) {
  FILE* file = fopen(program, "rb");
  if (file == NULL || fseek(file, -(long)CONTENT_BYTES, SEEK_END)) fail("the program's file cannot be read");
  for (int i = 0; i < ARGUMENTS; i++) {
    Argument* a = &arguments[i];
    for (int copy = 0; copy < COPIES; copy++) {
      values[copy][i] = a->value;
      if (a->value.type_index != kTVMFFIDLTensorPtr) continue;
      char* data = allocate(a->nbytes);
      if (copy) memcpy(data, views[0][i].data, a->nbytes);
      else if (fread(data, 1, a->period, file) != a->period) fail("the program's file is too short");
      for (size_t at = a->period; copy == 0 && at < a->nbytes; at += a->period) {
        memcpy(data + at, data, a->nbytes - at < a->period ? a->nbytes - at : a->period);
      }
      views[copy][i] = (DLTensor){data, {kDLCPU, 0}, a->ndim, a->dtype, a->shape, NULL, 0};
      values[copy][i].v_ptr = &views[copy][i];
    }
  }
  fclose(file);
}

static void call(TVMFFISafeCallType kernel, int copy) {
  TVMFFIAny result = {0};
  if (kernel(NULL, values[copy], ARGUMENTS, &result)) fail("the kernel failed");
}

/* Seconds of a call, on average over `calls`, each with the next copy of the arguments. */
static double seconds(TVMFFISafeCallType kernel, int calls) {
  static int next;
  struct timespec began, ended;
  clock_gettime(CLOCK_MONOTONIC, &began);
  for (int i = 0; i < calls; i++) call(kernel, next++ % COPIES);
  clock_gettime(CLOCK_MONOTONIC, &ended);
  return ((double)(ended.tv_sec - began.tv_sec) + 1e-9 * (double)(ended.tv_nsec - began.tv_nsec)) / calls;
}

/* NaN and infinities count as the largest number. */
static double magnitude(double x) { return fmin(fabs(x), DBL_MAX); }

static void print_differences(void) {
  float* expected[ARGUMENTS] = {NULL};
  call(__tvm_ffi_kernel_default, 0);
  for (int i = 0; i < ARGUMENTS; i++) {
    if (!arguments[i].output) continue;
    expected[i] = allocate(arguments[i].nbytes);
    memcpy(expected[i], views[0][i].data, arguments[i].nbytes);
    memset(views[0][i].data, 0, arguments[i].nbytes);
  }
  call(__tvm_ffi_kernel_candidate, 0);
  const char* separator = "";
  printf("{\"apart\": [");
  for (int i = 0; i < ARGUMENTS; i++) {
    if (!arguments[i].output) continue;
    const float* actual = views[0][i].data;
    double difference = 0, largest = 0;
    for (size_t k = 0; k < arguments[i].nbytes / sizeof(float); k++) {
      difference = fmax(difference, magnitude((double)actual[k] - (double)expected[i][k]));
      largest = fmax(largest, magnitude(expected[i][k]));
    }
    printf("%s[%.9g, %.9g]", separator, difference, largest);
    separator = ", ";
  }
}

int main(int argc, char** argv) {
  (void)argc;
  alarm(LIMIT_S);
#if defined(__x86_64__)
  syscall(SYS_arch_prctl, 0x1023, 18); /* ARCH_REQ_XCOMP_PERM, XTILEDATA: AMX's tiles; refused where there are none */
#endif
  TVMFFIAny threads = {.type_index = kTVMFFIInt}, result;
  threads.v_int64 = cores();
  __tvm_ffi_mlcpipe_threads(NULL, &threads, 1, &result);
  read_arguments(argv[0]);
  print_differences();
  double once = seconds(__tvm_ffi_kernel_default, 1);
  int calls = (int)ceil(1e-9 * HALF_NS / fmax(once, 1e-7));
  seconds(__tvm_ffi_kernel_default, calls);
  seconds(__tvm_ffi_kernel_candidate, calls);
  printf("], \"pairs\": [");
  for (int i = 0; i < PAIRS; i++) {
    double first = seconds(__tvm_ffi_kernel_default, calls);
    printf("%s[%.9g, %.9g]", i ? ", " : "", first, seconds(__tvm_ffi_kernel_candidate, calls));
  }
  printf("]}\n");
  return 0;
}
