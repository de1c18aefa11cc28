// Threads of a GPU on the CPU: each thread of a block is a fiber, a barrier or an exchange of 32 neighbours continues to the
// next one. For one shared library that runs kernels, whose code calls what is `extern "C"` here.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct Index { unsigned x, y, z; };
extern "C" {
__attribute__((visibility("default"))) Index threadIdx, blockIdx, blockDim, gridDim;
}

namespace {

constexpr size_t kStack = 64 << 10;
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

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "emulated GPU: %s in %s, block (%u, %u)\n", what, running ? running->name.c_str() : "no kernel",
          blockIdx.x, blockIdx.y);
  for (size_t i = 0; i < threads && i < 64; ++i) {
    const char* words[] = {"ready", "at a barrier", "in an exchange", "ended"};
    fprintf(stderr, "  thread %zu %s, line %d\n", i, words[fibers[i].state], fibers[i].line);
  }
  abort();
}

// Keeps the callee's registers on this stack, its pointer in *from, and switches to the other stack.
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

// Runs 32 neighbours until they wait for others.
void run_warp(size_t first) {
  size_t end = first + 32 < threads ? first + 32 : threads;
  for (;;) {
    size_t ran = 0, there = 0;
    for (current = first; current < end; ++current) {
      if (fibers[current].state != kReady) continue;
      emulated_switch(&scheduler, fibers[current].stack);
      ++ran;
    }
    for (size_t i = first; i < end; ++i) there += fibers[i].state == kInExchange;
    for (size_t i = first; there == 32 && i < end; ++i) fibers[i].state = kReady;
    if (there != 32 && !ran) return;
  }
}

// Warps go as far as they can, one after another, so that a barrier that is missing shows.
void run_block() {
  for (size_t i = 0; i < threads; ++i) begin(fibers[i]);
  for (auto& warp : warps) memset(warp.round, 0, sizeof warp.round);
  for (;;) {
    for (size_t first = 0; first < threads; first += 32) run_warp(first);
    size_t ended = 0, waiting = 0;
    for (size_t i = 0; i < threads; ++i) {
      ended += fibers[i].state == kEnded;
      waiting += fibers[i].state == kAtBarrier;
    }
    if (ended == threads) return;
    if (ended + waiting != threads) fail("threads wait for others that do not come");
    for (size_t i = 0; i < threads; ++i) if (fibers[i].state == kAtBarrier) fibers[i].state = kReady;
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

#pragma GCC visibility push(default)
extern "C" {

void emulated_barrier(int line) { leave(kAtBarrier, line); }

const uint64_t* emulated_exchange(uint64_t value, int line) {
  Warp& warp = warps[current / 32];
  int lane = int(current % 32), round = warp.round[lane]++ & 1;
  warp.slots[round][lane] = value;
  leave(kInExchange, line);
  return warp.slots[round];
}
int emulated_lane() { return int(current % 32); }
}
#pragma GCC visibility pop
