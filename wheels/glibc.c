/* What a linker takes from the compiler's and glibc's static parts for a shared library: compiled into the pool of a
 * wheel, as mlcpipe's own linker has no such files. */
#define HIDDEN __attribute__((visibility("hidden")))

HIDDEN void* __dso_handle = &__dso_handle; /* names this library */
extern int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void* library);
extern void __cxa_finalize(void* library);

HIDDEN int pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void)) {
  return __register_atfork(prepare, parent, child, __dso_handle);
}

__attribute__((destructor)) static void forget(void) { __cxa_finalize(__dso_handle); }
