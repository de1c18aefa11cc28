/* The threads that run the parallel loops of compiled code in this process: mlcpipe/native/pool.c with MLCPIPE_RUNTIME. */
#ifndef MLCPIPE_RUNTIME_POOL_H_
#define MLCPIPE_RUNTIME_POOL_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Makes loops run on so many threads from now on, the caller's among them: 1 to 1024. Other numbers change nothing.
 * Returns how many there are, fewer if the system gives no more. */
int mlcpipe_pool_threads(int count);

/* Loops of the calling thread, which are of a call with so many tokens, end with the error "Cancelled" soon after the
 * flag is no longer 0; NULL: no longer. */
void mlcpipe_pool_watch(const int* flag, int64_t tokens);

#ifdef __cplusplus
}
#endif

#endif /* MLCPIPE_RUNTIME_POOL_H_ */
