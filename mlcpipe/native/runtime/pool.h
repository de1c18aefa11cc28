/* The threads that run the parallel loops of compiled code in this process: mlcpipe/native/pool.c with MLCPIPE_RUNTIME. */
#ifndef MLCPIPE_RUNTIME_POOL_H_
#define MLCPIPE_RUNTIME_POOL_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Makes loops run on so many threads from now on, the caller's among them: 1 to 1024. Other numbers change nothing.
 * Unless the number is `fixed`, decode steps take fewer where they are faster so.
 * Returns how many there are, fewer if the system gives no more. */
int mlcpipe_pool_threads(int count, int fixed);

/* What a model's decode steps of n to 2 n - 1 rows took on so many threads; zeros at first. */
enum { MLCPIPE_ROW_CLASSES = 6 };
typedef struct {
  int most, threads, best, chosen, tries, steps;
  int64_t ns, best_ns;
} mlcpipe_step_threads;

/* The calling thread begins a decode step of so many rows; until it begins another, its loops run on as many threads as
 * made such steps fastest: with 2^MLCPIPE_ROW_CLASSES rows or more, on all. `choices` are MLCPIPE_ROW_CLASSES of the
 * model's own. */
void mlcpipe_pool_begin_step(mlcpipe_step_threads* choices, int64_t rows);
void mlcpipe_pool_end_step(void);

/* Loops of the calling thread, which are of a call with so many tokens, end with the error "Cancelled" soon after the
 * flag is no longer 0; NULL: no longer. */
void mlcpipe_pool_watch(const int* flag, int64_t tokens);

#ifdef __cplusplus
}

// A decode step of so many rows, for as long as this lives.
struct DecodeStep {
  DecodeStep(mlcpipe_step_threads* choices, int64_t rows) { mlcpipe_pool_begin_step(choices, rows); }
  ~DecodeStep() { mlcpipe_pool_end_step(); }
};
#endif

#endif /* MLCPIPE_RUNTIME_POOL_H_ */
