// The runtime is one translation unit, so the compiler reads TVM's headers, most of the code, only once.
#include "api.cc"
#include "atomic_file.cc"
#include "bundle/files.cc"
#include "bundle/json.cc"
#include "bundle/manifest.cc"
#include "bundle/sha256.cc"
#include "bundle/weights.cc"
#include "chat_file.cc"
#include "engine.cc"
#if defined(__APPLE__)
#include "host_apple.cc"
#else
#include "host.cc"
#endif
#include "host_memory.cc"
#include "library.cc"
#include "model.cc"
#include "plan.cc"
#include "sampler.cc"
#include "sequences.cc"
#include "static_code.cc"
#include "step.cc"
#include "workspace.cc"
