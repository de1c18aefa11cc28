/* Runs the parallel loops of a compiled library on its own threads; linked into the library (POSIX). With
 * MLCPIPE_RUNTIME it is part of the native runtime instead, whose libraries all run on the same threads (pool.h).
 *
 * TVM's pool gives every thread a fixed part of a loop and waits by sched_yield. This is slow next to another process on
 * the same core: the part on that core waits for the other process's time slice, and each yield gives the rest of
 * ours away (Linux 6.18 counts a yield as a whole slice). Decoding with two threads fell to 15 % of its quiet speed
 * with one busy process and to 4 % with two. Here no part belongs to a thread: a free thread takes the next part.
 * A waiting thread spins for SPIN_NS without yielding, then sleeps, so that the system can run delayed threads:
 * 68-76 % and 64 %, where 67 % and 50 % are fair.
 */
#ifndef _WIN32
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* tvm/runtime/c_backend_api.h */
typedef struct {
  void* sync_handle;
  int32_t num_task;
} Group;
typedef int (*Body)(int task_id, Group* group, void* closure);
typedef int (*Launch)(Body body, void* closure, int num_task);
#ifdef MLCPIPE_RUNTIME
#include "runtime/pool.h"

/* tvm/ffi/c_api.h */
extern void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* words);
#else
#if defined(__APPLE__)
#define WEAK __attribute__((weak_import))
#else
#define WEAK __attribute__((weak))
#endif
extern Launch __TVMBackendParallelLaunch WEAK;

/* tvm/runtime/c_backend_api.h */
typedef void* (*Alloc)(int device_type, int device, uint64_t bytes, int dtype_code, int dtype_bits);
typedef int (*Free)(int device_type, int device, void* data);
extern Alloc __TVMBackendAllocWorkspace WEAK;
extern Free __TVMBackendFreeWorkspace WEAK;

/* tvm/ffi/extra/c_env_api.h, tvm/ffi/c_api.h */
typedef struct {
  const char* data;
  size_t size;
} Bytes;
extern int TVMFFIEnvCheckSignals(void) WEAK;
extern int TVMFFIErrorCreate(const Bytes* kind, const Bytes* message, const Bytes* backtrace, void** error) WEAK;
extern void TVMFFIErrorSetRaised(void* error) WEAK;
extern int TVMFFIObjectDecRef(void* object) WEAK;

#include "kernel_errors.c"

/* tvm/ffi/c_api.h: TVMFFIAny */
typedef struct {
  int32_t type_index;
  uint32_t padding;
  int64_t value;
} Any;
enum { ANY_NONE = 0, ANY_INT = 1 };
#endif
enum { MAX_TASKS = 0xffff, MAX_THREADS = 1024, STACK_BYTES = 1 << 20 };

/* With one busy process, EPYC (Zen 5), 2 threads, 2026-11, Qwen2-0.5B / Llama-1B: 100 us leave 64 / 67 % of the quiet
 * speed, 50 us 67 / 71 %, 20 us 68 / 76 %. Alone, all three are equally fast. */
enum { SPIN_NS = 20000, SPINS_A_LOOK = 16 };
#define LINE _Alignas(128)

typedef struct {
  LINE _Atomic uint32_t go; /* the round to take part in */
  _Atomic int asleep;
  _Atomic int stop;
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
} Worker;

static Worker* workers;
static int worker_count;
static int lost_count; /* workers that a fork left in the parent; the next loop starts as many */
static pthread_mutex_t admin = PTHREAD_MUTEX_INITIALIZER;

/* The present loop. `ticket` holds its round, its number of tasks and the next task, so that a late thread cannot
 * take a task of a loop that is over with the data of the next. */
static LINE _Atomic uint64_t ticket;
static LINE _Atomic int32_t left;
static _Atomic int waiting;
static LINE Body body;
static void* closure;
static _Atomic int failed;
static _Atomic int stopped;
static uint32_t round_number;
static LINE atomic_flag in_use = ATOMIC_FLAG_INIT;
static pthread_mutex_t done_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t done = PTHREAD_COND_INITIALIZER;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ volatile("yield" ::: "memory");
#endif
}

#ifdef MLCPIPE_RUNTIME
static _Thread_local const int* cancelled;

static int look(void) { return __atomic_load_n(cancelled, __ATOMIC_RELAXED); }

static int raised(void) {
  TVMFFIErrorSetRaisedFromCStr("Cancelled", "");
  return -1;
}

/* Of a thread that comes while another has the pool. */
static int launch_elsewhere(Body loop, void* data, int num_task) {
  Group group = {NULL, num_task ? num_task : 1};
  int status = 0;
  for (int task = 0; task < group.num_task && !status; task++) status = loop(task, &group, data);
  return status;
}
#else
static int users;
static Launch tvm_launch;

static int look(void) { return TVMFFIEnvCheckSignals(); }

/* The error that stands for one of Python's. Without a backtrace, which takes half a second the first time. */
static int raised(void) {
  Bytes kind = {"EnvErrorAlreadySet", 18}, none = {"", 0};
  void* error;
  if (TVMFFIErrorCreate(&kind, &none, &none, &error) == 0) {
    TVMFFIErrorSetRaised(error);
    TVMFFIObjectDecRef(error);
  }
  return -1;
}

static int launch_elsewhere(Body loop, void* data, int num_task) { return tvm_launch(loop, data, num_task); }
#endif

/* A thread that watches signals lets Python's handlers run between tasks, and stops its loop where one raises an error;
 * in the native runtime it stops it when the call is cancelled. Each look takes Python's lock, which other threads of
 * Python may hold for 5 ms: no more than a tenth of the time goes into that. A task of such a thread takes some PART_NS:
 * we remember what a loop took for each token. */
enum { LOOK_NS = 20000000, LOOK_SHARE = 10, PART_NS = 20000000, FIRST_PARTS = 64, COSTS = 256 };
static _Thread_local int64_t watched_tokens; /* of the call that this thread is in; 0: it does not watch */
static _Thread_local int64_t next_look;
static struct Cost {
  Body body;
  double ns; /* per token */
} costs[COSTS];

static int interrupted(void) {
  if (!watched_tokens) return 0;
  int64_t began = now_ns();
  if (began < next_look) return 0;
  int found = look();
  int64_t now = now_ns();
  next_look = now + LOOK_NS + (LOOK_SHARE - 1) * (now - began);
  return found;
}

/* How many tasks each thread should get of a loop of this thread. */
static int parts_of(Body loop, const struct Cost* cost) {
  if (!watched_tokens) return 1;
  const double most = (double)MAX_TASKS / (worker_count + 1);
  const double parts = cost->body == loop ? 1 + cost->ns * (double)watched_tokens / PART_NS : FIRST_PARTS;
  return (int)(parts < most ? parts : most);
}

static void take_tasks(void) {
  for (;;) {
    uint64_t mine = atomic_fetch_add(&ticket, 1);
    int task = (int)(mine & MAX_TASKS), count = (int)(mine >> 16 & MAX_TASKS);
    if (task >= count) return;
    Group group = {NULL, count};
    if (!atomic_load(&stopped) && interrupted()) atomic_store(&stopped, 1);
    if (!atomic_load(&stopped) && body(task, &group, closure)) atomic_store(&failed, task + 1);
    if (atomic_fetch_sub(&left, 1) == 1 && atomic_load(&waiting)) {
      pthread_mutex_lock(&done_mutex);
      pthread_cond_signal(&done);
      pthread_mutex_unlock(&done_mutex);
    }
  }
}

static void* work(void* argument) {
  Worker* self = argument;
  uint32_t seen = 0;
  for (;;) {
    int64_t until = now_ns() + SPIN_NS;
    for (int i = 1; atomic_load(&self->go) == seen; i++) {
      relax();
      if (i % SPINS_A_LOOK || now_ns() < until) continue;
      pthread_mutex_lock(&self->mutex);
      atomic_store(&self->asleep, 1);
      while (atomic_load(&self->go) == seen) pthread_cond_wait(&self->wake, &self->mutex);
      atomic_store(&self->asleep, 0);
      pthread_mutex_unlock(&self->mutex);
    }
    seen = atomic_load(&self->go);
    if (self->stop) return NULL;
    take_tasks();
  }
}

static void call(Worker* worker, uint32_t round) {
  atomic_store(&worker->go, round);
  if (atomic_load(&worker->asleep)) {
    pthread_mutex_lock(&worker->mutex);
    pthread_cond_signal(&worker->wake);
    pthread_mutex_unlock(&worker->mutex);
  }
}

static void wait_for_others(void) {
  int64_t until = now_ns() + SPIN_NS;
  for (int i = 1; atomic_load(&left); i++) {
    relax();
    if (i % SPINS_A_LOOK || now_ns() < until) continue;
    pthread_mutex_lock(&done_mutex);
    atomic_store(&waiting, 1);
    while (atomic_load(&left)) pthread_cond_wait(&done, &done_mutex);
    atomic_store(&waiting, 0);
    pthread_mutex_unlock(&done_mutex);
  }
}

static void end(int count) {
  for (int i = 0; i < count; i++) {
    workers[i].stop = 1;
    call(&workers[i], atomic_load(&workers[i].go) + 1);
    pthread_join(workers[i].thread, NULL);
    pthread_mutex_destroy(&workers[i].mutex);
    pthread_cond_destroy(&workers[i].wake);
  }
  free(workers);
  workers = NULL;
  worker_count = 0;
}

/* As many as the system gives. */
static void begin(int count) {
  workers = count ? aligned_alloc(128, sizeof(Worker) * (size_t)count) : NULL;
  round_number = 0;
  pthread_attr_t attributes; /* musl's threads have 128 KB of stack, glibc's 8 MB of address space */
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  for (int i = 0; workers != NULL && i < count; i++) {
    Worker* worker = &workers[i];
    atomic_init(&worker->go, 0);
    atomic_init(&worker->asleep, 0);
    worker->stop = 0;
    pthread_mutex_init(&worker->mutex, NULL);
    pthread_cond_init(&worker->wake, NULL);
    if (pthread_create(&worker->thread, &attributes, work, worker)) break;
    worker_count = i + 1;
  }
  pthread_attr_destroy(&attributes);
}

/* TVMBackendParallelLaunch: tasks 0 to num_task - 1 of a loop; 0 leaves the number to us. Tasks that wait for each
 * other do not exist here: nothing in mlcpipe makes such loops. */
static int launch(Body loop, void* data, int num_task) {
  if (atomic_flag_test_and_set_explicit(&in_use, memory_order_acquire)) return launch_elsewhere(loop, data, num_task);
  if (lost_count) {
    begin(lost_count);
    lost_count = 0;
  }
  struct Cost* cost = &costs[((uintptr_t)loop >> 4) % COSTS];
  int count = num_task ? num_task : (worker_count + 1) * parts_of(loop, cost);
  int64_t began = watched_tokens ? now_ns() : 0;
  body = loop;
  closure = data;
  atomic_store(&failed, 0);
  atomic_store(&stopped, 0);
  atomic_store(&left, count);
  uint32_t round = ++round_number;
  atomic_store(&ticket, (uint64_t)round << 32 | (uint64_t)count << 16);
  for (int i = 0; i < worker_count; i++) call(&workers[i], round);
  take_tasks();
  wait_for_others();
  int status = 0, task = atomic_load(&failed) - 1;
  if (atomic_load(&stopped)) {
    status = raised();
  } else if (task >= 0) { /* once more on this thread, which then has the error's message */
    Group group = {NULL, count};
    status = loop(task, &group, data);
  } else if (watched_tokens) {
    *cost = (struct Cost){loop, (double)(now_ns() - began) / (double)watched_tokens};
  }
  atomic_flag_clear_explicit(&in_use, memory_order_release);
  return status;
}

/* Threads do not come along into a forked child, and a lock of another thread of the parent would stay locked there.
 * (Darwin calls a handler also when its library is gone; Apple's frameworks allow nothing but exec after a fork.) */
#ifndef __APPLE__
static void after_fork(void) {
  lost_count += worker_count;
  workers = NULL; /* their memory stays: one of them may have held its mutex */
  worker_count = 0;
  atomic_store(&waiting, 0);
  pthread_mutex_init(&admin, NULL);
  pthread_mutex_init(&done_mutex, NULL);
  pthread_cond_init(&done, NULL);
  atomic_flag_clear(&in_use);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }
#endif

/* With `in_use`, so that no loop runs on threads that end. */
static void resize(int count) {
  while (atomic_flag_test_and_set_explicit(&in_use, memory_order_acquire)) sched_yield();
  lost_count = 0;
  if (worker_count != count) {
    end(worker_count);
    begin(count);
  }
  atomic_flag_clear_explicit(&in_use, memory_order_release);
}

#ifdef MLCPIPE_RUNTIME
int TVMBackendParallelLaunch(Body loop, void* data, int num_task) { return launch(loop, data, num_task); }

int TVMBackendParallelBarrier(int task_id, Group* group) {
  (void)task_id;
  (void)group;
  return 0;
}

int mlcpipe_pool_threads(int count) {
  pthread_mutex_lock(&admin);
  if (count > 0 && count <= MAX_THREADS) resize(count - 1);
  int threads = worker_count + 1;
  pthread_mutex_unlock(&admin);
  return threads;
}

void mlcpipe_pool_watch(const int* flag, int64_t tokens) {
  cancelled = flag;
  watched_tokens = flag != NULL ? tokens : 0;
}
#else
/* Workspaces that kernels of a watched call took. One that is stopped leaves its own behind: they go back to TVM when the
 * call ends. */
enum { CPU = 1, MAX_TAKEN = 64 };
static Alloc tvm_alloc;
static Free tvm_free;
static _Thread_local void* taken[MAX_TAKEN];
static _Thread_local int taken_count;

static void* alloc_workspace(int device_type, int device, uint64_t bytes, int dtype_code, int dtype_bits) {
  void* data = tvm_alloc(device_type, device, bytes, dtype_code, dtype_bits);
  if (watched_tokens && data != NULL && taken_count < MAX_TAKEN) taken[taken_count++] = data;
  return data;
}

static int free_workspace(int device_type, int device, void* data) {
  for (int i = taken_count; i-- > 0;) {
    if (taken[i] != data) continue;
    taken[i] = taken[--taken_count];
    break;
  }
  return tvm_free(device_type, device, data);
}

/* With `admin`. */
static void keep_workspaces(int keep) {
  if (&__TVMBackendAllocWorkspace == NULL || &__TVMBackendFreeWorkspace == NULL) return;
  if (keep) {
    tvm_alloc = __TVMBackendAllocWorkspace;
    tvm_free = __TVMBackendFreeWorkspace;
  }
  __TVMBackendAllocWorkspace = keep ? alloc_workspace : tvm_alloc;
  __TVMBackendFreeWorkspace = keep ? free_workspace : tvm_free;
}

/* mlcpipe_threads(n): n > 0 adds a user, whose loops run on n threads from now on, the caller's among them; 0 takes
 * a user away, and with the last one loops run as TVM would. Returns how many threads there are now, 0 for TVM's. */
__attribute__((visibility("default"))) int __tvm_ffi_mlcpipe_threads(void* self, const Any* arguments, int32_t count,
                                                                    Any* result) {
  (void)self;
  int wanted = count > 0 && arguments[0].type_index == ANY_INT ? (int)arguments[0].value : 0;
  pthread_mutex_lock(&admin);
  if (&__TVMBackendParallelLaunch != NULL && wanted > 0 && wanted <= MAX_THREADS) {
    if (users++ == 0) {
      tvm_launch = __TVMBackendParallelLaunch;
      __TVMBackendParallelLaunch = launch;
      keep_workspaces(1);
    }
    resize(wanted - 1);
  } else if (wanted == 0 && users > 0 && --users == 0) {
    __TVMBackendParallelLaunch = tvm_launch;
    keep_workspaces(0);
    resize(0);
  }
  result->type_index = ANY_INT;
  result->padding = 0;
  result->value = users ? worker_count + 1 : 0;
  pthread_mutex_unlock(&admin);
  return 0;
}

/* mlcpipe_watch_signals(n): Python's handlers of signals run within this thread's loops, which are of a call with n
 * tokens; 0: no longer. */
__attribute__((visibility("default"))) int __tvm_ffi_mlcpipe_watch_signals(void* self, const Any* arguments,
                                                                           int32_t count, Any* result) {
  (void)self;
  watched_tokens = &TVMFFIEnvCheckSignals != NULL && count > 0 ? arguments[0].value : 0;
  while (!watched_tokens && taken_count) tvm_free(CPU, 0, taken[--taken_count]);
  result->type_index = ANY_NONE;
  result->padding = 0;
  result->value = 0;
  return 0;
}
#endif

/* RISC-V passes and returns a half in a floating-point register, also where LLVM calls these functions; TVM's weak ones,
 * which take it in an integer register, would compute nonsense. The lower 16 bits of the "float" are the half. */
#if defined(__riscv_float_abi_double) && !defined(__riscv_zfhmin)
static uint32_t bits_of(float number) {
  uint32_t bits;
  __builtin_memcpy(&bits, &number, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float number;
  __builtin_memcpy(&number, &bits, sizeof number);
  return number;
}

float mlcpipe_extend_half(float half) __asm__("__extendhfsf2");
float mlcpipe_extend_half(float half) {
  const uint32_t bits = bits_of(half) & 0xffff, sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  /* The exponent is 112 too small; multiplying puts it right, and subnormal halves too. */
  return float_of(bits_of(float_of(rest << 13) * 0x1p112f) | sign);
}

float mlcpipe_truncate_to_half(float number) __asm__("__truncsfhf2");
float mlcpipe_truncate_to_half(float number) {
  const uint32_t bits = bits_of(number), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00;
  } else if (rest >= 0x477ff000) { /* 65520 and more round to infinity */
    half = 0x7c00;
  } else if (rest < 0x38800000) { /* subnormal: the sum has the rounded half in its last bits */
    half = bits_of(float_of(rest) + 0.5f) - 0x3f000000;
  } else {
    half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  }
  return float_of(0xffff0000 | sign | half);
}
#endif
#endif
