/* Loaded before a program: allocations of one thread fail where a shared file says so. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of `thread`, the next `passes` allocations are made, and `fails` more are refused. Each counts itself down. */
struct plan {
  volatile int32_t thread, passes, fails;
};

static struct plan* plan;

__attribute__((constructor)) static void map(void) {
  const char* path = getenv("FAILING_MALLOC");
  const int file = path ? open(path, O_RDWR) : -1;
  void* mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) plan = mapped;
  if (file >= 0) close(file);
}

extern void* __libc_malloc(size_t bytes);

void* malloc(size_t bytes) {
  if (plan && plan->thread && plan->thread == (int32_t)syscall(SYS_gettid)) {
    if (plan->passes > 0) {
      --plan->passes;
    } else if (plan->fails > 0) {
      --plan->fails;
      return NULL;
    }
  }
  return __libc_malloc(bytes);
}
