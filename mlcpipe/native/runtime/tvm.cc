// TVM's runtime as one translation unit: what a compiled library calls, and no more. Compiled in a copy of TVM's source
// tree (mlcpipe/compiler/tvm_sources.py). Its thread pool is ours (mlcpipe/native/pool.c).
#define TVM_LOG_DEBUG 0
#define TVM_LOG_CUSTOMIZE 1
#define TVM_FFI_USE_LIBBACKTRACE 0
#define TVM_FFI_BACKTRACE_ON_SEGFAULT 0

#include <tvm/ffi/any.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/logging.h>

#include <cstring>
#include <limits>

#include "3rdparty/tvm-ffi/src/ffi/backtrace.cc"
#include "3rdparty/tvm-ffi/src/ffi/container.cc"
#include "3rdparty/tvm-ffi/src/ffi/custom_allocator.cc"
#include "3rdparty/tvm-ffi/src/ffi/dtype.cc"
#include "3rdparty/tvm-ffi/src/ffi/error.cc"
#include "3rdparty/tvm-ffi/src/ffi/extra/env_c_api.cc"
#include "3rdparty/tvm-ffi/src/ffi/extra/env_context.cc"
#include "3rdparty/tvm-ffi/src/ffi/extra/json_parser.cc"
#include "3rdparty/tvm-ffi/src/ffi/extra/json_writer.cc"
#include "3rdparty/tvm-ffi/src/ffi/extra/library_module.cc"
#include "3rdparty/tvm-ffi/src/ffi/extra/library_module_dynamic_lib.cc"
#include "3rdparty/tvm-ffi/src/ffi/extra/library_module_system_lib.cc"
#include "3rdparty/tvm-ffi/src/ffi/extra/module.cc"
#include "3rdparty/tvm-ffi/src/ffi/function.cc"
#include "3rdparty/tvm-ffi/src/ffi/init_once.cc"
#include "3rdparty/tvm-ffi/src/ffi/object.cc"
#include "3rdparty/tvm-ffi/src/ffi/tensor.cc"
#include "src/runtime/cpu_device_api.cc"
#include "src/runtime/device_api.cc"
#include "src/runtime/file_utils.cc"
#include "src/runtime/logging.cc"
#include "src/runtime/memory/memory_manager.cc"
#include "src/runtime/module.cc"
#include "src/runtime/tensor.cc"
#include "src/runtime/vm/builtin.cc"
#include "src/runtime/vm/bytecode.cc"
#include "src/runtime/vm/executable.cc"
#include "src/runtime/vm/vm.cc"
#include "src/runtime/workspace_pool.cc"

namespace tvm {
namespace runtime {
namespace detail {

// A host's output is its own: what TVM would print and abort for is an error, what it logs is dropped.
[[noreturn]] void LogFatalImpl(const std::string& file, int line, const std::string& message) {
  throw ffi::Error("InternalError", message, file + ":" + std::to_string(line));
}

void LogMessageImpl(const std::string&, int, int, const std::string&) {}

}  // namespace detail
}  // namespace runtime
}  // namespace tvm
