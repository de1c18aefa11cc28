/* The runtime's SHA-256, for downloads. */
#ifndef MLCPIPE_SHA256_H_
#define MLCPIPE_SHA256_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes 64 hexadecimal digits, and 0. */
void mlcpipe_sha256(const void* data, size_t bytes, char digits[65]);

#ifdef __cplusplus
}
#endif

#endif /* MLCPIPE_SHA256_H_ */
