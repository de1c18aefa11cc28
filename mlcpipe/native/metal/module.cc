#include "module.h"

#include <tvm/ffi/cast.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>

#include "plugin.h"
#include "src/runtime/pack_args.h"
#include "src/support/bytes_io.h"

namespace mlcpipe::metal {
namespace {

namespace ffi = tvm::ffi;

constexpr size_t kMaxBuffers = 31;                       // Metal feature set tables
constexpr size_t kMaxConstants = 4096 / sizeof(int64_t);  // of setBytes
constexpr size_t kMaxGroups = UINT32_MAX;

std::string Text(const ffi::String& text) { return std::string(text.data(), text.size()); }

// Format, functions and sources, as TVM's code generator writes them.
ffi::Module Load(const ffi::Bytes& bytes) {
  tvm::support::BytesInStream stream(bytes);
  ffi::String format;
  MetalModule::Functions functions;
  MetalModule::Sources sources;
  if (!stream.Read(&format) || !stream.Read(&functions) || !stream.Read(&sources)) {
    TVM_FFI_THROW(RuntimeError) << "the library's kernels for Metal are damaged";
  }
  if (Text(format) != "metal") {
    TVM_FFI_THROW(RuntimeError) << "expected kernels in Metal's language, found " << Text(format);
  }
  return ffi::Module(ffi::make_object<MetalModule>(sources, functions));
}

}  // namespace

Kernel::Kernel(std::string source, const tvm::runtime::FunctionInfo& info)
    : name_(Text(info->name)),
      source_(std::move(source)),
      arguments_(info->arg_types.size()),
      buffers_(tvm::runtime::NumBufferArgs(info->arg_types)) {
  const size_t numbers = arguments_ - buffers_;
  if (buffers_ + (numbers ? 1 : 0) > kMaxBuffers || numbers > kMaxConstants) {
    TVM_FFI_THROW(RuntimeError) << "kernel " << name_ << " takes " << buffers_ << " buffers and " << numbers
                                << " numbers; Metal has at most " << kMaxBuffers << " and " << kMaxConstants;
  }
  launch_.Init(arguments_, info->launch_param_tags);
}

Kernel::~Kernel() {
  if (pipeline_.state) Device::Get().Release(pipeline_.state);
}

void Kernel::Call(ffi::PackedArgs arguments, const void* numbers) {
  std::call_once(compiled_, [this] { pipeline_ = Device::Get().Compile(name_, source_); });
  Launch launch;
  launch.pipeline = pipeline_.state;
  for (size_t i = 0; i < buffers_; ++i) launch.buffers.push_back(arguments[static_cast<int>(i)].cast<void*>());
  launch.constants = numbers;
  launch.constant_bytes = (arguments_ - buffers_) * sizeof(int64_t);
  const tvm::runtime::ThreadWorkLoad load = launch_.Extract(arguments);
  for (size_t i = 0; i < 3; ++i) {
    launch.groups[i] = load.grid_dim(i);
    launch.threads[i] = load.block_dim(i);
  }
  const size_t threads = launch.threads[0] * launch.threads[1] * launch.threads[2];
  if (threads > pipeline_.max_threads) {
    TVM_FFI_THROW(RuntimeError) << "metal: kernel " << name_ << " needs " << threads << " threads in a threadgroup, at most "
                                << pipeline_.max_threads << " are possible; compile the model for this device";
  }
  if (*std::max_element(launch.groups, launch.groups + 3) > kMaxGroups) {
    TVM_FFI_THROW(RuntimeError) << "metal: kernel " << name_ << " has an impossible number of threadgroups";
  }
  Device::Get().Dispatch(name_, launch);
}

MetalModule::MetalModule(const Sources& sources, Functions functions) : functions_(std::move(functions)) {
  for (const auto& [name, info] : functions_) {
    const auto source = sources.Get(name);
    if (!source.has_value()) TVM_FFI_THROW(RuntimeError) << "the library has no kernel " << Text(name);
    kernels_.emplace(Text(name), std::make_unique<Kernel>(Text(source.value()), info));
  }
}

ffi::Optional<ffi::Function> MetalModule::GetFunction(const ffi::String& name) {
  const auto found = kernels_.find(Text(name));
  if (found == kernels_.end()) return std::nullopt;
  // The function keeps the module alive, and with it the kernel.
  auto call = [kernel = found->second.get(), module = ffi::GetRef<ffi::Module>(this)](
                  ffi::PackedArgs arguments, ffi::Any*, const tvm::runtime::ArgUnion64* numbers) {
    kernel->Call(arguments, numbers);
  };
  return tvm::runtime::PackFuncNonBufferArg(call, functions_[name]->arg_types);
}

void RegisterModules() {
  tvm::ffi::reflection::GlobalDef().def("ffi.Module.load_from_bytes.metal", Load);
}

}  // namespace mlcpipe::metal
