#ifndef NDEBUG
#define NDEBUG
#endif
@DEFINITIONS@

#include "metal/plugin.mm"
