/* Intel's AMX on an x86-64 Linux machine without it: what the CPU refuses (SIGILL) is decoded, done here and skipped.
 *
 * Linked into a program or loaded into a process, this takes over SIGILL automatically; on a machine with AMX it asks the
 * system for the tiles instead, and the CPU runs the same code. Instructions as in the Intel SDM, volume 2, and its
 * chapter 18 of volume 1: ldtilecfg, sttilecfg, tilerelease, tilezero, tileloadd, tileloaddt1, tilestored, tdpbssd,
 * tdpbsud, tdpbusd, tdpbuud, tdpbf16ps. Where a CPU would fault the process ends with a message; any other illegal
 * instruction stays one. Tiles belong to a thread, as they do there.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, BYTES = 64 }; /* of palette 1 */
enum { NONE = 0, P66 = 1, F3 = 2, F2 = 3 }; /* VEX.pp */
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };

typedef struct {
  uint8_t palette, start_row, unused_a[14];
  uint16_t colsb[TILES], unused_b[8];
  uint8_t rows[TILES], unused_c[8];
} Config;
_Static_assert(sizeof(Config) == 64, "ldtilecfg reads 64 bytes");

typedef struct {
  uint8_t opcode, prefix;
  int reg, rm, vvvv, in_memory, has_sib;
  uint64_t address; /* of memory without the index, which is `stride` */
  uint64_t stride;
  int length;
} Instruction;

static atomic_long executed;
static _Thread_local Config config;
static _Thread_local uint8_t tiles[TILES][ROWS][BYTES];

static void fault(const char* words) {
  static const char prefix[] = "amx_emulator: ";
  (void)!write(2, prefix, sizeof prefix - 1);
  (void)!write(2, words, strlen(words));
  (void)!write(2, "\n", 1);
  abort();
}

/* 1 while this thread has tiles configured: a context switch then saves 8 KiB, and power states are kept from it. */
int amx_in_use(void) { return config.palette != 0; }

/* How many instructions ran here, 0 where the CPU has them. */
long amx_emulated(void) { return atomic_load(&executed); }

static uint64_t general_register(const greg_t* registers, int number) {
  static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return (uint64_t)registers[order[number]];
}

/* SDM volume 2, 2.3 (VEX) and 2.1.5 (ModR/M and SIB). 0: not an instruction of AMX. */
static int decode(const uint8_t* p, const greg_t* registers, Instruction* out) {
  if (p[0] != 0xC4 || (p[1] & 31) != 2 || p[2] & 0x84) return 0; /* three-byte VEX, map 0F38, W0, 128 bits */
  int r = !(p[1] & 0x80) << 3, x = !(p[1] & 0x40) << 3, b = !(p[1] & 0x20) << 3, mode = p[4] >> 6;
  memset(out, 0, sizeof *out);
  out->prefix = p[2] & 3;
  out->vvvv = ~p[2] >> 3 & 15;
  out->opcode = p[3];
  out->reg = (p[4] >> 3 & 7) | r;
  out->rm = (p[4] & 7) | b;
  out->in_memory = mode != 3;
  out->length = 5;
  if (p[3] != 0x49 && p[3] != 0x4B && p[3] != 0x5C && p[3] != 0x5E) return 0;
  if (!out->in_memory) return 1;
  int base = out->rm, wide = mode == 2;
  out->has_sib = (p[4] & 7) == 4;
  if (out->has_sib) {
    int index = (p[5] >> 3 & 7) | x;
    if (index != 4) out->stride = general_register(registers, index) << (p[5] >> 6);
    base = (p[5] & 7) | b;
    out->length = 6;
  }
  int no_base = mode == 0 && (base & 7) == 5; /* a displacement alone; without SIB from the next instruction */
  if (!no_base) out->address = general_register(registers, base);
  const uint8_t* displacement = p + out->length;
  if (wide || no_base) {
    int32_t distance;
    memcpy(&distance, displacement, 4);
    out->address += (uint64_t)(int64_t)distance;
    out->length += 4;
  } else if (mode == 1) {
    out->address += (uint64_t)(int64_t)(int8_t)*displacement;
    out->length += 1;
  }
  if (no_base && !out->has_sib) out->address += (uint64_t)(uintptr_t)p + (uint64_t)out->length;
  return 1;
}

static void load_config(const uint8_t* memory) {
  Config wanted;
  memcpy(&wanted, memory, sizeof wanted);
  if (wanted.palette > 1) fault("ldtilecfg: #GP, a palette above 1");
  if (wanted.palette == 0) memset(&wanted, 0, sizeof wanted);
  static const uint8_t zero[14];
  if (memcmp(wanted.unused_a, zero, 14) || memcmp(wanted.unused_b, zero, 14) || wanted.unused_b[7] ||
      memcmp(wanted.unused_c, zero, 8)) {
    fault("ldtilecfg: #GP, reserved bytes that are not zero");
  }
  if (wanted.start_row >= ROWS) fault("ldtilecfg: #GP, a first row past the last");
  for (int t = 0; t < TILES; t++) {
    if (wanted.colsb[t] > BYTES || wanted.rows[t] > ROWS) fault("ldtilecfg: #GP, a tile above 16 rows of 64 bytes");
    if (!wanted.colsb[t] != !wanted.rows[t]) fault("ldtilecfg: #GP, a tile with rows and no columns or the reverse");
  }
  config = wanted;
  memset(tiles, 0, sizeof tiles);
}

static void require_tile(int t) {
  if (!config.palette) fault("#UD, no tiles are configured in this thread");
  if (t >= TILES || !config.rows[t] || !config.colsb[t]) fault("#UD, a tile that is not configured");
}

static void zero_upper(int t, int from) {
  for (int r = from; r < ROWS; r++) memset(tiles[t][r], 0, BYTES);
}

static void load_tile(int t, uint64_t address, uint64_t stride) {
  require_tile(t);
  for (int r = config.start_row; r < config.rows[t]; r++) {
    memset(tiles[t][r], 0, BYTES);
    memcpy(tiles[t][r], (const void*)(uintptr_t)(address + (uint64_t)r * stride), config.colsb[t]);
  }
  zero_upper(t, config.rows[t]);
  config.start_row = 0;
}

static void store_tile(int t, uint64_t address, uint64_t stride) {
  require_tile(t);
  for (int r = config.start_row; r < config.rows[t]; r++) {
    memcpy((void*)(uintptr_t)(address + (uint64_t)r * stride), tiles[t][r], config.colsb[t]);
  }
  config.start_row = 0;
}

static void require_product(int c, int a, int b) {
  require_tile(c);
  require_tile(a);
  require_tile(b);
  if (c == a || c == b || a == b) fault("product of tiles: #UD, the same tile twice");
  if (config.start_row) fault("product of tiles: #UD, a first row other than 0");
  if (config.colsb[c] % 4 || config.colsb[a] % 4 || config.colsb[b] % 4) fault("product of tiles: #UD, bytes % 4");
  if (config.rows[c] != config.rows[a]) fault("product of tiles: #UD, rows of the sum and of the first factor");
  if (config.colsb[c] != config.colsb[b]) fault("product of tiles: #UD, columns of the sum and of the second factor");
  if (config.colsb[a] / 4 != config.rows[b]) fault("product of tiles: #UD, columns of one factor, rows of the other");
}

static int byte_of(const uint8_t* p, int is_signed) { return is_signed ? (int8_t)*p : *p; }

/* TDPB[SU][SU]D: int32 sums, modulo 2**32. */
static void multiply_bytes(int c, int a, int b, int a_signed, int b_signed) {
  require_product(c, a, b);
  for (int m = 0; m < config.rows[c]; m++) {
    uint32_t sums[ROWS];
    memcpy(sums, tiles[c][m], BYTES);
    for (int k = 0; k < config.rows[b]; k++) {
      for (int n = 0; n < config.colsb[c] / 4; n++) {
        for (int i = 0; i < 4; i++) {
          sums[n] += (uint32_t)(byte_of(&tiles[a][m][4 * k + i], a_signed) * byte_of(&tiles[b][k][4 * n + i], b_signed));
        }
      }
    }
    memset(tiles[c][m], 0, BYTES);
    memcpy(tiles[c][m], sums, config.colsb[c]);
  }
  zero_upper(c, config.rows[c]);
}

/* Subnormal numbers count as zeros, in and out. */
static float flushed(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x; }

static float bfloat16(const uint8_t* p) {
  uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}

/* TDPBF16PS: even and odd numbers are summed apart from 0, then together, then onto the tile. */
static void multiply_bfloat16(int c, int a, int b) {
  require_product(c, a, b);
  for (int m = 0; m < config.rows[c]; m++) {
    for (int n = 0; n < config.colsb[c] / 4; n++) {
      float parts[2] = {0, 0}, sum;
      for (int k = 0; k < config.rows[b]; k++) {
        for (int i = 0; i < 2; i++) {
          float x = bfloat16(&tiles[a][m][4 * k + 2 * i]), y = bfloat16(&tiles[b][k][4 * n + 2 * i]);
          parts[i] = flushed(fmaf(x, y, parts[i]));
        }
      }
      memcpy(&sum, &tiles[c][m][4 * n], 4);
      sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
      memcpy(&tiles[c][m][4 * n], &sum, 4);
    }
  }
  zero_upper(c, config.rows[c]);
}

static int run(const Instruction* i) {
  uint64_t at = i->address;
  if (i->opcode == 0x49) {
    if (i->vvvv) return 0;
    if (i->in_memory && (i->reg & 7) == 0 && i->prefix == NONE) load_config((void*)(uintptr_t)(at + i->stride));
    else if (i->in_memory && (i->reg & 7) == 0 && i->prefix == P66) memcpy((void*)(uintptr_t)(at + i->stride), &config, 64);
    else if (!i->in_memory && i->reg == 0 && i->rm == 0 && i->prefix == NONE) {
      memset(&config, 0, sizeof config);
      memset(tiles, 0, sizeof tiles);
    } else if (!i->in_memory && i->rm == 0 && i->prefix == F2) {
      require_tile(i->reg);
      memset(tiles[i->reg], 0, sizeof tiles[i->reg]);
      config.start_row = 0;
    } else return 0;
    return 1;
  }
  if (i->opcode == 0x4B) {
    if (i->vvvv || !i->has_sib) return 0;
    if (i->prefix == F2 || i->prefix == P66) load_tile(i->reg, at, i->stride); /* tileloadd, tileloaddt1 */
    else if (i->prefix == F3) store_tile(i->reg, at, i->stride);
    else return 0;
    return 1;
  }
  if (i->in_memory) return 0;
  if (i->opcode == 0x5E) {
    multiply_bytes(i->reg, i->rm, i->vvvv, i->prefix == F2 || i->prefix == F3, i->prefix == F2 || i->prefix == P66);
    return 1;
  }
  if (i->prefix != F3) return 0;
  multiply_bfloat16(i->reg, i->rm, i->vvvv);
  return 1;
}

static void on_illegal_instruction(int number, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  Instruction instruction;
  (void)info;
  if (decode((const uint8_t*)(uintptr_t)registers[REG_RIP], registers, &instruction) && run(&instruction)) {
    registers[REG_RIP] += instruction.length;
    atomic_fetch_add(&executed, 1);
    return;
  }
  signal(number, SIG_DFL); /* and once more, now without us */
}

__attribute__((constructor)) static void take_over(void) {
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1) {
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA)) fault("the system does not grant the CPU's tiles");
    return;
  }
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, NULL);
}
