// Apple's GPU on the CPU, behind mlcpipe's device API for Metal. Commands run when somebody waits for them, not before.
// Kernels are compiled by a function of the tests: `CompileKernels` of python.cc and native.cc.
#include <dlfcn.h>

#include <functional>
#include <map>
#include <set>

#include "../../emulator/fibers.h"
#include "device.cc"
#include "device_api.cc"
#include "module.cc"

namespace mlcpipe::metal {

// The path of a shared library with kernels, which are given as sources by name.
std::string CompileKernels(const MetalModule::Sources& sources);

namespace {

constexpr int64_t kMemory = int64_t(8) << 30;
// A threadgroup may have 1024 threads, fewer where a kernel takes many registers: of those here none has more than 256.
constexpr size_t kMaxThreads = 256;

// The kernels of one module, by their sources.
std::map<std::string, MetalModule::Sources> modules;
std::string failure;  // of the next wait

struct Object {
  virtual ~Object() = default;
};

struct Buffer final : Object {
  explicit Buffer(size_t count) : memory((char*)aligned_alloc(256, (count + 511) / 256 * 256)) {
    memset(memory, 0xff, count);  // not a number: nobody may count on zeros
  }
  ~Buffer() { free(memory); }
  char* memory;
};

struct State final : Object {
  Function function;
};

class EmulatedGpu final : public Gpu {
 public:
  EmulatedGpu() {
    info_.name = "an emulated GPU";
    info_.system = "of a test";
    info_.memory_bytes = info_.max_buffer_bytes = kMemory;
    info_.shared_bytes = 32 << 10;
  }
  const GpuInfo& info() const final { return info_; }
  uint64_t free_bytes() const final { return kMemory; }

  Memory Allocate(size_t bytes) final {
    auto* made = new Buffer(bytes);
    objects_[made].reset(made);
    return {made, made->memory};
  }

  Pipeline Compile(const std::string& kernel, const std::string& source, std::string* problem) final {
    auto sources = modules.find(source);
    if (sources == modules.end()) {
      *problem = "no such source";
      return {};
    }
    const std::string path = CompileKernels(sources->second);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TVM_FFI_ICHECK(library) << dlerror();
    auto* call = (void (*)(void**))dlsym(library, ("emulated_" + kernel).c_str());
    auto* waits = (const int*)dlsym(library, ("emulated_waits_" + kernel).c_str());
    TVM_FFI_ICHECK(call && waits) << "no kernel " << kernel;
    auto* made = new State;
    made->function = {kernel, call, *waits != 0, (void (*)())dlsym(library, "emulated_forget")};
    objects_[made].reset(made);
    return {made, kMaxThreads};
  }

  void Release(void* object) final { TVM_FFI_ICHECK(objects_.erase(object)) << "released twice"; }

  void Dispatch(const Launch& made) final {
    auto state = objects_.at(made.pipeline);
    std::vector<std::shared_ptr<Object>> buffers;
    for (void* buffer : made.buffers) buffers.push_back(objects_.at(buffer));
    std::vector<char> constants((const char*)made.constants, (const char*)made.constants + made.constant_bytes);
    commands_.push_back([state, buffers, constants, made]() mutable {
      std::vector<void*> arguments;
      for (auto& buffer : buffers) arguments.push_back(static_cast<Buffer&>(*buffer).memory);
      arguments.push_back(constants.data());
      gridDim = {unsigned(made.groups[0]), unsigned(made.groups[1]), unsigned(made.groups[2])};
      blockDim = {unsigned(made.threads[0]), unsigned(made.threads[1]), unsigned(made.threads[2])};
      launch(static_cast<State&>(*state).function, arguments.data());
    });
  }

  void Copy(void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes) final {
    commands_.push_back([=, source = objects_.at(from), target = objects_.at(to)] {
      memmove(static_cast<Buffer&>(*target).memory + to_offset, static_cast<Buffer&>(*source).memory + from_offset, bytes);
    });
  }

  void Submit() final {}

  std::string Wait() final {
    for (auto& command : commands_) command();
    commands_.clear();
    return std::exchange(failure, "");
  }

 private:
  GpuInfo info_;
  std::map<void*, std::shared_ptr<Object>> objects_;
  std::vector<std::function<void()>> commands_;
};

void Remember(const MetalModule::Sources& sources) {
  for (auto [name, source] : sources) modules[Text(source)] = sources;
}

ffi::Module LoadAndRemember(const ffi::Bytes& bytes) {
  ffi::Module module = Load(bytes);
  tvm::support::BytesInStream stream(bytes);
  ffi::String format;
  MetalModule::Functions functions;
  MetalModule::Sources sources;
  stream.Read(&format) && stream.Read(&functions) && stream.Read(&sources);
  Remember(sources);
  return module;
}

}  // namespace

std::unique_ptr<Gpu> OpenGpu() { return std::make_unique<EmulatedGpu>(); }

void Register() {
  RegisterDeviceApi();
  RegisterModules();
  ffi::Function::SetGlobal("ffi.Module.load_from_bytes.metal", ffi::Function::FromTyped(LoadAndRemember), true);
}

}  // namespace mlcpipe::metal
