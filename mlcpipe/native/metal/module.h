// A runtime module of kind "metal": kernels as source, which TVM's host code calls.
#ifndef MLCPIPE_METAL_MODULE_H_
#define MLCPIPE_METAL_MODULE_H_

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/module.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "device.h"
#include "src/runtime/metadata.h"
#include "src/runtime/thread_storage_scope.h"

namespace mlcpipe::metal {

// A kernel; it is compiled at its first call.
class Kernel {
 public:
  // Throws for one that Metal cannot take.
  Kernel(std::string source, const tvm::runtime::FunctionInfo& info);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // `numbers` are the arguments that are no buffers, 8 bytes each; extents follow the arguments.
  void Call(tvm::ffi::PackedArgs arguments, const void* numbers);

 private:
  const std::string name_, source_;
  size_t arguments_, buffers_;
  tvm::runtime::LaunchParamConfig launch_;
  std::once_flag compiled_;
  Pipeline pipeline_;
};

class MetalModule final : public tvm::ffi::ModuleObj {
 public:
  using Sources = tvm::ffi::Map<tvm::ffi::String, tvm::ffi::String>;
  using Functions = tvm::ffi::Map<tvm::ffi::String, tvm::runtime::FunctionInfo>;
  MetalModule(const Sources& sources, Functions functions);

  const char* kind() const final { return "metal"; }
  int GetPropertyMask() const final { return tvm::ffi::Module::kRunnable; }
  tvm::ffi::Optional<tvm::ffi::Function> GetFunction(const tvm::ffi::String& name) final;

 private:
  Functions functions_;
  std::unordered_map<std::string, std::unique_ptr<Kernel>> kernels_;
};

}  // namespace mlcpipe::metal

#endif  // MLCPIPE_METAL_MODULE_H_
