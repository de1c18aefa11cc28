/* pool.c under changing numbers of threads, tasks and pauses, and what it chooses for decode steps. */
#include "../../mlcpipe/native/pool.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 500, KEY = 42 };
static int runs[MOST + 1], held_up_us;

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* words) {
  (void)kind;
  (void)words;
}

static int count_run(int task, Group* group, void* data) {
  if (*(int*)data != KEY) abort(); /* a loop that is over */
  runs[task] += group->num_task;
  if (held_up_us && task == 1) usleep((useconds_t)held_up_us);
  return 0;
}

static int stress(int rounds) {
  unsigned seed = 7;
  atomic_store(&loop.go, (uint64_t)(uint32_t)-(rounds / 2) << 32); /* rounds begin again at 0 halfway */
  for (int i = 0; i < rounds; i++) {
    int key = KEY;
    const int tasks = rand_r(&seed) % 4 ? 1 + rand_r(&seed) % 10 : 1 + rand_r(&seed) % MOST;
    if (rand_r(&seed) % 50 == 0) mlcpipe_pool_threads(1 + rand_r(&seed) % 9, 0);
    if (rand_r(&seed) % 5 == 0) most_threads = rand_r(&seed) % 6;
    if (rand_r(&seed) % 40 == 0) usleep((useconds_t)rand_r(&seed) % 5000);
    held_up_us = rand_r(&seed) % 60 ? 0 : rand_r(&seed) % 400;
    memset(runs, 0, sizeof runs);
    if (TVMBackendParallelLaunch(count_run, &key, tasks)) return 1;
    for (int task = 0; task <= MOST; task++) {
      if (runs[task] == (task < tasks ? tasks : 0)) continue;
      return printf("round %d, task %d of %d: %d\n", i, task, tasks, runs[task]);
    }
    key = 0;
  }
  return mlcpipe_pool_threads(1, 0) != 1;
}

static int slow_run(int task, Group* group, void* data) {
  (void)task, (void)group, (void)data;
  usleep(1000);
  return 0;
}

static void* run_slowly(void* argument) {
  return TVMBackendParallelLaunch(slow_run, NULL, 200) ? argument : NULL;
}

/* Children that are made during a loop of another thread, and run loops with a late task. */
static int forks(int count) {
  for (int i = 0; i < count; i++) {
    pthread_t other;
    mlcpipe_pool_threads(8, 1);
    if (pthread_create(&other, NULL, run_slowly, NULL)) return 1;
    usleep(5000);
    const pid_t child = fork();
    if (!child) {
      alarm(20);
      held_up_us = 4000;
      for (int k = 0; k < 20; k++) {
        int key = KEY;
        TVMBackendParallelLaunch(count_run, &key, 8);
      }
      _exit(0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status) return printf("child %d: %d\n", i, status);
    pthread_join(other, NULL);
  }
  return mlcpipe_pool_threads(1, 0) != 1;
}

/* How many of 16 threads steps of `rows` rows end up with, if a step on n threads takes `ns[n]`. */
static int chosen(const int64_t* ns, int64_t rows) {
  mlcpipe_step_threads choices[MLCPIPE_ROW_CLASSES] = {0};
  for (int i = 0; i < 100; i++) {
    begin_step(choices, rows);
    const int threads = most_threads ? most_threads : worker_count + 1;
    atomic_store(&crowd.until, 0);
    end_step(step_began + ns[threads]);
  }
  begin_step(choices, rows);
  return most_threads ? most_threads : worker_count + 1;
}

int main(int count, char** words) {
  if (count == 2) return stress(atoi(words[1]));
  if (count == 3) return forks(atoi(words[2]));
  const int64_t s = 1000000000, more[] = {[16] = s, [8] = 2 * s, [4] = 4 * s};
  const int64_t fewer[] = {[16] = 9 * s, [8] = 5 * s, [4] = 3 * s, [2] = 2 * s, [1] = s};
  const int64_t four[] = {[16] = 4 * s, [8] = 3 * s, [4] = 2 * s, [2] = 5 * s};
  mlcpipe_pool_threads(16, 0);
  printf("%d %d %d %d\n", chosen(more, 1), chosen(fewer, 1), chosen(four, 8), chosen(fewer, 64));
  const int64_t odd[] = {[15] = 4 * s, [7] = 3 * s, [3] = 5 * s};
  mlcpipe_pool_threads(15, 0);
  printf("%d\n", chosen(odd, 1));
  mlcpipe_pool_threads(16, 1);
  printf("%d\n", chosen(fewer, 1));
  return mlcpipe_pool_threads(1, 0) != 1;
}
