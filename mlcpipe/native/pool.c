/* Runs the parallel loops of a compiled library on its own threads; linked into the library (POSIX). With
 * MLCPIPE_RUNTIME it is part of the native runtime instead, whose libraries all run on the same threads (pool.h).
 *
 * TVM's pool gives every thread a fixed part of a loop and waits by sched_yield. This is slow next to another process on
 * the same core: the part on that core waits for the other process's time slice, and each yield gives the rest of
 * ours away (Linux 6.18 counts a yield as a whole slice). Decoding with two threads fell to 15 % of its quiet speed
 * with one busy process and to 4 % with two. Here a thread begins with its own part and then takes parts that others
 * have not begun. Who waits spins without yielding, then sleeps, so that the system can run delayed threads. On a quiet
 * machine it spins through the pauses between loops and between steps: to wake 15 sleeping threads for each loop takes
 * as long as the loop. Where other processes want our cores it sleeps soon: see `account`.
 */
#ifndef _WIN32
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <sys/resource.h>
#endif

/* tvm/runtime/c_backend_api.h */
typedef struct {
  void* sync_handle;
  int32_t num_task;
} Group;
typedef int (*Body)(int task_id, Group* group, void* closure);
typedef int (*Launch)(Body body, void* closure, int num_task);
#include "runtime/pool.h"
#ifdef MLCPIPE_RUNTIME
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

#define LINE _Alignas(128)

/* A thread of the pool; the first stands for the caller. Its line changes hands twice in a loop. */
typedef struct {
  LINE _Atomic uint64_t taken; /* round << 32 | how many of its tasks were taken */
  _Atomic uint64_t done;       /* the same of those that are done */
  _Atomic int asleep;
  _Atomic int stop;
  uint64_t seen; /* the loop before its first */
  LINE pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
} Worker;

static Worker workers[MAX_THREADS];
static _Atomic int worker_count; /* without the caller */
static int lost_count;           /* workers that a fork left in the parent; the next loop starts as many */
static pthread_mutex_t admin = PTHREAD_MUTEX_INITIALIZER;

/* The present loop. `go` holds its round, its number of tasks, and how many threads share them: task t is one of thread
 * t % threads. A late thread cannot take a task of a loop that is over with the data of the next, as all tasks of its
 * round are taken. All spin on the line of `go`: what the caller writes before it is on another. */
static struct {
  LINE _Atomic uint64_t go; /* round << 32 | tasks << 16 | threads */
  _Atomic int sleepers;     /* among the threads that have a part in such loops */
  LINE Body body;
  void* closure;
  _Atomic int failed, stopped, waiting;
} loop;
static int threads_of_last;
static LINE atomic_flag in_use = ATOMIC_FLAG_INIT;
static pthread_mutex_t done_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t done = PTHREAD_COND_INITIALIZER;
static _Thread_local int most_threads; /* of the loops of this thread; 0: all */
static _Atomic int fixed_threads;      /* the user chose their number */

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

/* Whether others want our cores: a spinning thread that looks at the clock sees a gap where it was not running. If more
 * than a twentieth of WINDOW_NS is lost to gaps, threads sleep after SHORT_NS for CROWDED_NS, and LONG_NS again then.
 * With one busy process, EPYC (Zen 5), 2 threads, 2026-11, Qwen2-0.5B / Llama-1B: 100 us leave 64 / 67 % of the quiet
 * speed, 50 us 67 / 71 %, 20 us 68 / 76 %. Alone, all three are equally fast there; with 16 threads (Xeon) 3 ms are
 * 1.2 times as fast as 20 us. */
enum { SHORT_NS = 20000, LONG_NS = 3000000, SPINS_A_LOOK = 16, STEAL_NS = 2000 };
enum { WAIT_NS = 100000, GAP_NS = 50000, WINDOW_NS = 50000000, CROWDED_NS = 500000000, SLICE_NS = 3000000, ROUNDS_A_CHECK = 64 };
enum { ROUNDS_A_RENEWAL = 1 << 20 };
static struct {
  LINE _Atomic int64_t until, lost_ns, began;
} crowd;

static void account(int64_t gap, int64_t now) {
  if (gap < GAP_NS) return;
  if (now - atomic_load(&crowd.began) > WINDOW_NS) {
    atomic_store(&crowd.began, now);
    atomic_store(&crowd.lost_ns, 0);
  }
  if (atomic_fetch_add(&crowd.lost_ns, gap) + gap > WINDOW_NS / 20) atomic_store(&crowd.until, now + CROWDED_NS);
}

static int64_t spin_ns(int64_t now) { return now < atomic_load(&crowd.until) ? SHORT_NS : LONG_NS; }

/* What a thread loses inside its tasks, where it looks at no clock. */
static void check_thread(void) {
#ifdef RUSAGE_THREAD
  static _Thread_local long known;
  struct rusage usage;
  if (getrusage(RUSAGE_THREAD, &usage)) return;
  for (; known && known < usage.ru_nivcsw; known++) account(SLICE_NS / 3, now_ns());
  known = usage.ru_nivcsw;
#endif
}

/* Spins until `word` is no longer `seen`, or for so long after `began` -> whether it changed. */
static int spin(const _Atomic uint64_t* word, uint64_t seen, int64_t began, int64_t ns) {
  int64_t last = began;
  for (int i = 1; atomic_load_explicit(word, memory_order_acquire) == seen; i++) {
    relax();
    if (i % SPINS_A_LOOK) continue;
    int64_t now = now_ns();
    account(now - last, now);
    if (now - began >= ns) return atomic_load(word) != seen;
    last = now;
  }
  return 1;
}

#ifdef MLCPIPE_RUNTIME
static _Thread_local const int* cancelled;

static int look(void) { return __atomic_load_n(cancelled, __ATOMIC_RELAXED); }

static int raised(void) {
  TVMFFIErrorSetRaisedFromCStr("Cancelled", "");
  return -1;
}

/* Of a thread that comes while another has the pool. */
static int launch_elsewhere(Body body, void* data, int num_task) {
  Group group = {NULL, num_task ? num_task : 1};
  int status = 0;
  for (int task = 0; task < group.num_task && !status; task++) status = body(task, &group, data);
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

static int launch_elsewhere(Body body, void* data, int num_task) { return tvm_launch(body, data, num_task); }
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
static int parts_of(Body body, const struct Cost* cost) {
  if (!watched_tokens) return 1;
  const double most = (double)MAX_TASKS / (worker_count + 1);
  const double parts = cost->body == body ? 1 + cost->ns * (double)watched_tokens / PART_NS : FIRST_PARTS;
  return (int)(parts < most ? parts : most);
}

static _Thread_local mlcpipe_step_threads* choice; /* of the step that this thread is in, while it is timed */

static int tasks_of(uint64_t go) { return (int)(go >> 16 & MAX_TASKS); }

static int threads_of(uint64_t go) { return (int)(go & MAX_TASKS); }

/* How many threads have a task. */
static int busy_of(uint64_t go) { return tasks_of(go) < threads_of(go) ? tasks_of(go) : threads_of(go); }

/* One more task of thread `slot` in the loop `go` -> its number, or -1: none is left. */
static int take(int slot, uint64_t go) {
  const uint32_t round = (uint32_t)(go >> 32);
  Worker* owner = &workers[slot];
  uint64_t found = atomic_load(&owner->taken);
  for (;;) {
    const uint32_t at = (uint32_t)(found >> 32);
    const int task = slot + threads_of(go) * (at == round ? (int)(uint32_t)found : 0);
    if ((int32_t)(at - round) > 0 || task >= tasks_of(go)) return -1;
    const uint64_t next = at == round ? found + 1 : (uint64_t)round << 32 | 1;
    if (atomic_compare_exchange_weak(&owner->taken, &found, next)) return task;
  }
}

static void count_done(int slot, uint32_t round) {
  Worker* owner = &workers[slot];
  uint64_t found = atomic_load(&owner->done), next;
  do {
    next = (uint32_t)(found >> 32) == round ? found + 1 : (uint64_t)round << 32 | 1;
  } while (!atomic_compare_exchange_weak(&owner->done, &found, next));
  if (atomic_load(&loop.waiting)) {
    pthread_mutex_lock(&done_mutex);
    pthread_cond_signal(&done);
    pthread_mutex_unlock(&done_mutex);
  }
}

static void run_tasks(int slot, uint64_t go) {
  Group group = {NULL, tasks_of(go)};
  for (int task; (task = take(slot, go)) >= 0;) {
    if (!atomic_load(&loop.stopped) && interrupted()) atomic_store(&loop.stopped, 1);
    if (!atomic_load(&loop.stopped) && loop.body(task, &group, loop.closure)) atomic_store(&loop.failed, task + 1);
    count_done(slot, (uint32_t)(go >> 32));
  }
}

static void run_tasks_of_others(int slot, uint64_t go) {
  for (int i = 1; i < threads_of(go); i++) run_tasks((slot + i) % threads_of(go), go);
}

static void wake(Worker* worker) {
  if (!atomic_load(&worker->asleep)) return;
  pthread_mutex_lock(&worker->mutex);
  pthread_cond_signal(&worker->wake);
  pthread_mutex_unlock(&worker->mutex);
}

/* Each thread wakes two, so that the last of 64 waits for six wakes. */
static void wake_next(int slot, uint64_t go) {
  if (!atomic_load(&loop.sleepers)) return;
  for (int i = 2 * slot + 1; i <= 2 * slot + 2 && i < busy_of(go); i++) wake(&workers[i]);
}

static void sleep_until_loop(Worker* self, uint64_t seen, int part) {
  pthread_mutex_lock(&self->mutex);
  atomic_fetch_add(&loop.sleepers, part);
  atomic_store(&self->asleep, 1);
  while (atomic_load(&loop.go) == seen) pthread_cond_wait(&self->wake, &self->mutex);
  atomic_store(&self->asleep, 0);
  atomic_fetch_sub(&loop.sleepers, part);
  pthread_mutex_unlock(&self->mutex);
}

static void* work(void* argument) {
  Worker* self = argument;
  const int slot = (int)(self - workers);
  for (uint64_t go = self->seen;;) {
    if (slot >= threads_of(go)) { /* has no part in such loops */
      sleep_until_loop(self, go, 0);
    } else {
      const int64_t began = now_ns();
      if (!spin(&loop.go, go, began, STEAL_NS)) {
        run_tasks_of_others(slot, go);
        const int64_t again = now_ns();
        if (!spin(&loop.go, go, again, spin_ns(again))) sleep_until_loop(self, go, 1);
      }
    }
    go = atomic_load(&loop.go);
    if (self->stop) return NULL;
    if (slot >= threads_of(go)) continue;
    wake_next(slot, go);
    run_tasks(slot, go);
    if (tasks_of(go) > threads_of(go)) run_tasks_of_others(slot, go);
    if ((go >> 32) % ROUNDS_A_CHECK == 0) check_thread();
  }
}

static void wait_for_others(uint64_t go) {
  const int threads = threads_of(go), tasks = tasks_of(go);
  int64_t last = now_ns(), until = last + STEAL_NS;
  int stolen = 0;
  for (int slot = 0; slot < busy_of(go); slot++) { /* others may have taken tasks of ours */
    const uint64_t all = go >> 32 << 32 | (uint64_t)((tasks - slot + threads - 1) / threads);
    for (int i = 1; atomic_load_explicit(&workers[slot].done, memory_order_acquire) != all; i++) {
      relax();
      if (i % SPINS_A_LOOK) continue;
      const int64_t now = now_ns();
      account(now - last, now);
      last = now;
      if (now < until) continue;
      if (!stolen) {
        stolen = 1;
        run_tasks_of_others(0, go);
        last = now_ns();
        until = last + WAIT_NS;
        continue;
      }
      pthread_mutex_lock(&done_mutex);
      atomic_store(&loop.waiting, 1);
      while (atomic_load(&workers[slot].done) != all) pthread_cond_wait(&done, &done_mutex);
      atomic_store(&loop.waiting, 0);
      pthread_mutex_unlock(&done_mutex);
      last = now_ns();
    }
  }
}

static void end(void) {
  for (int i = 1; i <= worker_count; i++) atomic_store(&workers[i].stop, 1);
  atomic_store(&loop.go, ((atomic_load(&loop.go) >> 32) + 1) << 32);
  for (int i = 1; i <= worker_count; i++) {
    wake(&workers[i]);
    pthread_join(workers[i].thread, NULL);
    pthread_mutex_destroy(&workers[i].mutex);
    pthread_cond_destroy(&workers[i].wake);
  }
  worker_count = 0;
}

/* As many as the system gives. */
static void begin(int count) {
  pthread_attr_t attributes; /* musl's threads have 128 KB of stack, glibc's 8 MB of address space */
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  for (int i = 1; i <= count; i++) {
    Worker* worker = &workers[i];
    atomic_store(&worker->asleep, 0);
    atomic_store(&worker->stop, 0);
    worker->seen = atomic_load(&loop.go);
    pthread_mutex_init(&worker->mutex, NULL);
    pthread_cond_init(&worker->wake, NULL);
    if (pthread_create(&worker->thread, &attributes, work, worker)) break;
    worker_count = i;
  }
  pthread_attr_destroy(&attributes);
  threads_of_last = 0;
}

/* TVMBackendParallelLaunch: tasks 0 to num_task - 1 of a loop; 0 leaves the number to us. Tasks that wait for each
 * other do not exist here: nothing in mlcpipe makes such loops. */
static int launch(Body body, void* data, int num_task) {
  if (atomic_flag_test_and_set_explicit(&in_use, memory_order_acquire)) {
    choice = NULL; /* this step's time says nothing about the pool */
    return launch_elsewhere(body, data, num_task);
  }
  if (lost_count) {
    begin(lost_count);
    lost_count = 0;
  }
  struct Cost* cost = &costs[((uintptr_t)body >> 4) % COSTS];
  const int threads = most_threads && most_threads <= worker_count ? most_threads : worker_count + 1;
  const int count = num_task ? num_task : threads * parts_of(body, cost);
  const int64_t began = now_ns();
  loop.body = body;
  loop.closure = data;
  atomic_store_explicit(&loop.failed, 0, memory_order_relaxed);
  atomic_store_explicit(&loop.stopped, 0, memory_order_relaxed);
  const uint32_t round = (uint32_t)(atomic_load(&loop.go) >> 32) + 1;
  const int others = threads != threads_of_last;
  if (others || round % ROUNDS_A_RENEWAL == 0) { /* so that no thread's round is half of all rounds behind */
    for (int i = 0; i <= worker_count; i++) {
      atomic_store(&workers[i].taken, (uint64_t)(round - 1) << 32 | MAX_TASKS);
      atomic_store(&workers[i].done, (uint64_t)(round - 1) << 32);
    }
    threads_of_last = threads;
  }
  const uint64_t go = (uint64_t)round << 32 | (uint64_t)count << 16 | (uint64_t)threads;
  atomic_store(&loop.go, go);
  if (others) {
    for (int i = 1; i < threads; i++) wake(&workers[i]);
  } else {
    wake_next(0, go);
  }
  run_tasks(0, go);
  if (count > threads) run_tasks_of_others(0, go);
  wait_for_others(go);
  if (round % ROUNDS_A_CHECK == 0) check_thread();
  int status = 0, task = atomic_load(&loop.failed) - 1;
  if (atomic_load(&loop.stopped)) {
    status = raised();
  } else if (task >= 0) { /* once more on this thread, which then has the error's message */
    Group group = {NULL, count};
    status = body(task, &group, data);
  } else if (watched_tokens) {
    *cost = (struct Cost){body, (double)(now_ns() - began) / (double)watched_tokens};
  }
  atomic_flag_clear_explicit(&in_use, memory_order_release);
  return status;
}

/* How many threads decode steps take: small models decode faster on two than on sixteen, and slow cores of a processor
 * hold fast ones up. For each doubling of rows we time TRIES steps on all threads, then on half as many for as long as
 * that is faster, and begin again after STEPS_A_CHOICE. */
enum { TRIES = 6, STEPS_A_CHOICE = 1 << 14 };
static _Thread_local int64_t step_began;

static void begin_step(mlcpipe_step_threads* choices, int64_t rows) {
  int row_class = 0;
  while (row_class < MLCPIPE_ROW_CLASSES && rows >> (row_class + 1)) row_class++;
  choice = NULL;
  most_threads = 0;
  if (row_class == MLCPIPE_ROW_CLASSES || atomic_load_explicit(&fixed_threads, memory_order_relaxed)) return;
  const int most = atomic_load_explicit(&worker_count, memory_order_relaxed) + 1; /* another thread may change it */
  choice = &choices[row_class];
  if (choice->steps++ % STEPS_A_CHOICE == 0 || choice->most != most) {
    *choice = (mlcpipe_step_threads){.most = most, .threads = most, .best = most, .steps = 1};
  }
  if (!choice->chosen && choice->steps > STEPS_A_CHOICE / 2) { /* crowded all the time */
    choice->threads = choice->best;
    choice->chosen = 1;
  }
  most_threads = choice->threads;
  step_began = now_ns();
}

static void end_step(int64_t now) {
  const int64_t ns = now - step_began;
  if (choice != NULL && !choice->chosen && now >= atomic_load(&crowd.until)) {
    if (!choice->ns || ns < choice->ns) choice->ns = ns;
    if (++choice->tries == TRIES) {
      if (choice->best_ns && choice->ns > choice->best_ns / 100 * 97) {
        choice->threads = choice->best;
        choice->chosen = 1;
      } else {
        choice->best = choice->threads;
        choice->best_ns = choice->ns;
        choice->chosen = choice->threads == 1;
        if (!choice->chosen) choice->threads /= 2;
        choice->tries = 0;
        choice->ns = 0;
      }
    }
  }
  choice = NULL;
}

/* Threads do not come along into a forked child, and a lock of another thread of the parent would stay locked there.
 * (Darwin calls a handler also when its library is gone; Apple's frameworks allow nothing but exec after a fork.) */
#ifndef __APPLE__
static void after_fork(void) {
  lost_count += worker_count;
  worker_count = 0;
  atomic_store(&loop.go, ((atomic_load(&loop.go) >> 32) + 1) << 32); /* no thread begins with the parent's loop */
  atomic_store(&loop.waiting, 0);
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
    end();
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

int mlcpipe_pool_threads(int count, int fixed) {
  pthread_mutex_lock(&admin);
  if (count > 0 && count <= MAX_THREADS) {
    fixed_threads = fixed;
    resize(count - 1);
  }
  int threads = worker_count + 1;
  pthread_mutex_unlock(&admin);
  return threads;
}

void mlcpipe_pool_begin_step(mlcpipe_step_threads* choices, int64_t rows) { begin_step(choices, rows); }

void mlcpipe_pool_end_step(void) { end_step(now_ns()); }

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

/* mlcpipe_threads(n, most): n > 0 adds a user, whose loops run on n threads from now on, the caller's among them, or with
 * `most` decode steps on fewer if they are faster so; 0 takes a user away, and with the last one loops run as TVM would. Returns how many threads there are now, 0 for TVM's. */
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
    fixed_threads = count < 2 || !arguments[1].value;
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

/* mlcpipe_step(n): this thread begins a decode step of n rows, whose number of threads is chosen by time; 0: ends it;
 * -1: begins something else, on all threads. Returns how many threads its loops run on from now on. */
__attribute__((visibility("default"))) int __tvm_ffi_mlcpipe_step(void* self, const Any* arguments, int32_t count,
                                                                 Any* result) {
  static _Thread_local mlcpipe_step_threads choices[MLCPIPE_ROW_CLASSES];
  (void)self;
  const int64_t rows = count > 0 ? arguments[0].value : 0;
  if (rows) {
    begin_step(choices, rows > 0 ? rows : INT64_MAX);
  } else {
    end_step(now_ns());
  }
  *result = (Any){ANY_INT, 0, most_threads ? most_threads : worker_count + 1};
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
