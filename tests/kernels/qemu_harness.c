/* Runs compiled kernels without TVM's runtime: reads calls from stdin, writes the outputs to stdout.
 *
 * A stream of calls, little-endian, until its end:
 *   i32 kernel (index in KERNELS), i32 number of arguments, then each argument:
 *     i32 0, i64 value                                                  an integer
 *     i32 1, f64 value                                                  a float
 *     i32 2, u8 code, u8 bits, u16 lanes, i32 ndim, i64 shape[ndim], data    a tensor (DLPack's type codes)
 *   The reply to each: i32 status; 0: every tensor's data, in order; else: i32 length and that many bytes of message.
 *
 * A tensor ends, rounded up to its alignment, at a page that may not be touched, and begins after bytes that must
 * stay as they are: what a kernel reads past an end stops the process, what it writes past one is reported.
 * The first argument of the program, 0 without one, is how many bytes further that page is.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <tvm/ffi/c_api.h>

typedef struct {
  void* sync_handle;
  int32_t num_task;
} ParallelGroupEnv; /* TVMParallelGroupEnv of tvm/runtime/c_backend_api.h */

typedef int (*ParallelLambda)(int task_id, ParallelGroupEnv* env, void* closure);

typedef struct {
  uint8_t* base;
  size_t mapped;
  uint8_t* data;
  size_t nbytes;
  int64_t shape[8];
  DLTensor view;
} Tensor;

extern const TVMFFISafeCallType KERNELS[];
extern const int32_t NUM_KERNELS;

enum { ALIGNMENT = 64, PAGE = 4096, UNTOUCHED = 0xA5, TASKS = 3, MAX_ARGS = 32, MAX_MESSAGE = 1024 };
static char message[MAX_MESSAGE];
static size_t slack;

static void complain(const char* words) { strncat(message, words, MAX_MESSAGE - strlen(message) - 1); }

void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  complain(kind);
  complain(": ");
  for (int32_t i = 0; i < count; ++i) {
    if (parts[i] != NULL) complain(parts[i]);
  }
}

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* words) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &words, 1);
}

/* One after the other: the same split of the work as by threads, and the same result every time. */
static int parallel_launch(ParallelLambda lambda, void* closure, int num_task) {
  ParallelGroupEnv env = {NULL, num_task ? num_task : TASKS};
  for (int i = 0; i < env.num_task; ++i) {
    int status = lambda(i, &env, closure);
    if (status != 0) return status;
  }
  return 0;
}

static void* alloc_workspace(int device, int id, uint64_t nbytes, int code, int bits) {
  (void)device, (void)id, (void)code, (void)bits;
  void* found = NULL;
  if (posix_memalign(&found, ALIGNMENT, nbytes ? nbytes : 1) != 0) return NULL;
  memset(found, 0xFF, nbytes); /* NaN: a read before the first write shows */
  return found;
}

static int free_workspace(int device, int id, void* memory) {
  (void)device, (void)id;
  free(memory);
  return 0;
}

/* Objects of TVM call its runtime through these pointers, which a loader fills in. */
__attribute__((weak)) void *__TVMBackendParallelLaunch, *__TVMBackendAllocWorkspace, *__TVMBackendFreeWorkspace;

/* amx_emulator.c */
__attribute__((weak)) int amx_in_use(void);

static void must_read(void* into, size_t nbytes) {
  if (fread(into, 1, nbytes, stdin) != nbytes) {
    fprintf(stderr, "the stream of calls ends early\n");
    exit(3);
  }
}

static void read_tensor(Tensor* t) {
  memset(t, 0, sizeof *t);
  must_read(&t->view.dtype, 4);
  must_read(&t->view.ndim, 4);
  if (t->view.ndim < 0 || t->view.ndim > 8) exit(3);
  must_read(t->shape, 8 * (size_t)t->view.ndim);
  t->nbytes = (size_t)t->view.dtype.bits / 8 * t->view.dtype.lanes;
  for (int i = 0; i < t->view.ndim; ++i) t->nbytes *= (size_t)t->shape[i];
  size_t aligned = (t->nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + slack;
  t->mapped = (aligned + 2 * PAGE - 1) / PAGE * PAGE + PAGE; /* at least one byte before, one page behind */
  t->base = mmap(NULL, t->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (t->base == MAP_FAILED || mprotect(t->base + t->mapped - PAGE, PAGE, PROT_NONE) != 0) {
    perror("memory of a tensor");
    exit(3);
  }
  memset(t->base, UNTOUCHED, t->mapped - PAGE);
  t->data = t->base + t->mapped - PAGE - aligned;
  must_read(t->data, t->nbytes);
  t->view.data = t->data;
  t->view.device.device_type = kDLCPU;
  t->view.shape = t->shape;
}

static void check_surroundings(const Tensor* t, int index) {
  char words[64];
  for (const uint8_t* p = t->base; p < t->base + t->mapped - PAGE; ++p) {
    if ((p < t->data || p >= t->data + t->nbytes) && *p != UNTOUCHED) {
      snprintf(words, sizeof words, "wrote %td bytes from the start of argument %d; ", p - t->data, index);
      complain(words);
      return;
    }
  }
}

static void call(int32_t kernel) {
  static Tensor tensors[MAX_ARGS];
  TVMFFIAny args[MAX_ARGS], result;
  int32_t count, kind, status;
  must_read(&count, 4);
  if (count < 0 || count > MAX_ARGS || kernel < 0 || kernel >= NUM_KERNELS) exit(3);
  memset(args, 0, sizeof args);
  memset(&result, 0, sizeof result);
  memset(tensors, 0, sizeof tensors);
  for (int32_t i = 0; i < count; ++i) {
    must_read(&kind, 4);
    if (kind == 2) {
      read_tensor(&tensors[i]);
      args[i].type_index = kTVMFFIDLTensorPtr;
      args[i].v_ptr = &tensors[i].view;
    } else {
      args[i].type_index = kind == 0 ? kTVMFFIInt : kTVMFFIFloat;
      must_read(&args[i].v_int64, 8);
    }
  }
  message[0] = 0;
  status = KERNELS[kernel](NULL, args, count, &result);
  for (int32_t i = 0; i < count; ++i) {
    if (tensors[i].base != NULL) check_surroundings(&tensors[i], i);
  }
  if (amx_in_use && amx_in_use()) complain("tiles were not released; ");
  if (status == 0 && message[0]) status = 1;
  fwrite(&status, 4, 1, stdout);
  if (status != 0) {
    int32_t length = (int32_t)strlen(message);
    fwrite(&length, 4, 1, stdout);
    fwrite(message, 1, (size_t)length, stdout);
  }
  for (int32_t i = 0; i < count; ++i) {
    if (tensors[i].base == NULL) continue;
    if (status == 0) fwrite(tensors[i].data, 1, tensors[i].nbytes, stdout);
    munmap(tensors[i].base, tensors[i].mapped);
  }
  fflush(stdout);
}

int main(int argc, char** argv) {
  int32_t kernel;
  slack = argc > 1 ? strtoul(argv[1], NULL, 10) / ALIGNMENT * ALIGNMENT : 0;
  __TVMBackendParallelLaunch = (void*)parallel_launch;
  __TVMBackendAllocWorkspace = (void*)alloc_workspace;
  __TVMBackendFreeWorkspace = (void*)free_workspace;
  while (fread(&kernel, 4, 1, stdin) == 1) call(kernel);
  return 0;
}
