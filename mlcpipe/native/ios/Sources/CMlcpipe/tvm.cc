#pragma clang diagnostic ignored "-Weverything"
#ifndef NDEBUG
#define NDEBUG
#endif
@DEFINITIONS@

#include "runtime/tvm.cc"
