/* Runs the parallel loops of a compiled library on threads of its own; linked into the library (POSIX).
 *
 * TVM's pool gives every thread a fixed part of a loop and waits by sched_yield. Beside another process on the same
 * core that is slow: the part on that core waits for the other process's time slice, and each yield gives the rest of
 * ours away (Linux 6.18 counts a yield as a whole slice). Decoding with two threads fell to 15 % of its quiet speed
 * beside one busy process and to 4 % beside two. Here no part belongs to a thread: who is done takes the part of one
 * that has not come yet. And who waits spins for SPIN_NS without giving anything away, then sleeps, so that the system
 * has a processor for whoever was held up: 68-76 % and 64 %, where 67 % and 50 % are fair.
 */
#ifndef _WIN32
#define _GNU_SOURCE
#include <pthread.h>
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
#if defined(__APPLE__)
extern Launch __TVMBackendParallelLaunch __attribute__((weak_import));
#else
extern Launch __TVMBackendParallelLaunch __attribute__((weak));
#endif

/* tvm/ffi/c_api.h: TVMFFIAny */
typedef struct {
  int32_t type_index;
  uint32_t padding;
  int64_t value;
} Any;
enum { ANY_NONE = 0, ANY_INT = 1, MAX_TASKS = 0xffff, MAX_THREADS = 1024 };

/* Beside one busy process, EPYC (Zen 5), 2 threads, 2026-11, Qwen2-0.5B / Llama-1B: 100 us leave 64 / 67 % of the quiet
 * speed, 50 us 67 / 71 %, 20 us 68 / 76 %. Alone, all three are equally fast. */
enum { SPIN_NS = 20000, SPINS_A_LOOK = 16 };
#define LINE _Alignas(128)

typedef struct {
  LINE _Atomic uint32_t go; /* the round to take part in */
  _Atomic int asleep;
  int stop;
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
} Worker;

static Worker* workers;
static int worker_count;
static int users;
static Launch tvm_launch;
static pthread_mutex_t admin = PTHREAD_MUTEX_INITIALIZER;

/* The present loop. `ticket` holds its round, its number of tasks and the next task, so that a late thread cannot
 * take a task of a loop that is over with the data of the next. */
static LINE _Atomic uint64_t ticket;
static LINE _Atomic int32_t left;
static _Atomic int waiting;
static LINE Body body;
static void* closure;
static _Atomic int failed;
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

static void take_tasks(void) {
  for (;;) {
    uint64_t mine = atomic_fetch_add(&ticket, 1);
    int task = (int)(mine & MAX_TASKS), count = (int)(mine >> 16 & MAX_TASKS);
    if (task >= count) return;
    Group group = {NULL, count};
    if (body(task, &group, closure)) atomic_store(&failed, task + 1);
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

/* TVMBackendParallelLaunch: tasks 0 to num_task - 1 of a loop; 0 leaves the number to us. Tasks that wait for each
 * other do not exist here: nothing in mlcpipe makes such loops. */
static int launch(Body loop, void* data, int num_task) {
  int count = num_task ? num_task : worker_count + 1;
  if (atomic_flag_test_and_set_explicit(&in_use, memory_order_acquire)) return tvm_launch(loop, data, num_task);
  body = loop;
  closure = data;
  atomic_store(&failed, 0);
  atomic_store(&left, count);
  uint32_t round = ++round_number;
  atomic_store(&ticket, (uint64_t)round << 32 | (uint64_t)count << 16);
  for (int i = 0; i < worker_count; i++) call(&workers[i], round);
  take_tasks();
  wait_for_others();
  int status = 0, task = atomic_load(&failed) - 1;
  if (task >= 0) { /* once more on this thread, which then has the error's message */
    Group group = {NULL, count};
    status = loop(task, &group, data);
  }
  atomic_flag_clear_explicit(&in_use, memory_order_release);
  return status;
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
  for (int i = 0; workers != NULL && i < count; i++) {
    Worker* worker = &workers[i];
    atomic_init(&worker->go, 0);
    atomic_init(&worker->asleep, 0);
    worker->stop = 0;
    pthread_mutex_init(&worker->mutex, NULL);
    pthread_cond_init(&worker->wake, NULL);
    if (pthread_create(&worker->thread, NULL, work, worker)) return;
    worker_count = i + 1;
  }
}

/* mlcpipe_threads(n): n > 0 adds a user, for whom loops run on n threads from now on, the caller's among them; 0 takes
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
    }
    if (worker_count != wanted - 1) {
      end(worker_count);
      begin(wanted - 1);
    }
  } else if (wanted == 0 && users > 0 && --users == 0) {
    __TVMBackendParallelLaunch = tvm_launch;
    end(worker_count);
  }
  result->type_index = ANY_INT;
  result->padding = 0;
  result->value = users ? worker_count + 1 : 0;
  pthread_mutex_unlock(&admin);
  return 0;
}
#endif
