/* libstdc++ asks whether the process has one thread, by a variable that glibc has since 2.32. Wheels run on older ones:
 * here it always has more. */
#ifndef MLCPIPE_SINGLE_THREADED_H_
#define MLCPIPE_SINGLE_THREADED_H_
static const char __libc_single_threaded = 0;
#endif
