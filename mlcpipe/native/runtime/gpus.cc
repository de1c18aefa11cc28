// What depends on the kinds of GPUs that a runtime is built with. Who builds several compiles the rest once.
#include "metal.cc"
#include "vulkan.cc"
