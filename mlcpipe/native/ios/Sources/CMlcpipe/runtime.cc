#ifndef NDEBUG
#define NDEBUG
#endif
@DEFINITIONS@

#include "runtime/runtime.cc"
