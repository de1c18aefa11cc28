/* The code of the model in this package, for mlcpipe_options.code. */
#ifndef MLCPIPE_MODEL_H_
#define MLCPIPE_MODEL_H_

#include "mlcpipe.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__APPLE__)
extern const mlcpipe_symbol @TABLE@[];
static inline const mlcpipe_symbol* mlcpipe_model_code(void) { return @TABLE@; }
#else /* the engine opens bundles that have a shared library */
static inline const mlcpipe_symbol* mlcpipe_model_code(void) { return NULL; }
#endif

#ifdef __cplusplus
}
#endif

#endif /* MLCPIPE_MODEL_H_ */
