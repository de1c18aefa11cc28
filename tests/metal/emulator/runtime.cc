// Stands in for TVM's Metal runtime, which exists on macOS only (src/backend/metal/runtime of TVM): one device, whose
// memory the host's code cannot point into, and modules of kind "metal". Kernels are compiled by a function of the tests,
// "emulated_metal.compile": Map<name, source> -> path of a shared library.
#include <dlfcn.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/device_api.h>

#include <map>
#include <memory>
#include <set>

#include "../../emulator/fibers.h"
#include "src/runtime/metadata.h"
#include "src/runtime/pack_args.h"
#include "src/runtime/thread_storage_scope.h"
#include "support/bytes_io.h"

namespace {

namespace ffi = tvm::ffi;
using namespace tvm::runtime;

constexpr int64_t kMemory = int64_t(8) << 30;
// A threadgroup may have 1024 threads, fewer where a kernel takes many registers: of those here none has more than 256.
constexpr size_t kMaxThreads = 256, kMaxBuffers = 31;

// What a tensor's data is: no address, as Metal's buffers are none.
struct Buffer {
  explicit Buffer(size_t count) : size(count), memory((char*)aligned_alloc(256, (count + 511) / 256 * 256)) {
    memset(memory, 0xff, size);  // not a number: nobody may count on zeros
  }
  ~Buffer() { free(memory); }
  size_t size;
  char* memory;
};

struct Api final : DeviceAPI {
  std::set<Buffer*> live;

  static Api* Get() {
    static auto* api = new Api;
    return api;
  }
  char* At(const void* data, size_t offset, size_t size) {
    auto* buffer = (Buffer*)data;
    TVM_FFI_ICHECK(live.count(buffer)) << "no buffer of the device";
    TVM_FFI_ICHECK_LE(offset + size, buffer->size) << "beyond a buffer";
    return buffer->memory + offset;
  }

  void SetDevice(tvm::Device device) final { TVM_FFI_ICHECK_EQ(device.device_id, 0); }
  void GetAttr(tvm::Device device, DeviceAttrKind kind, ffi::Any* result) final {
    if (kind == kExist) *result = int(device.device_id == 0);
    if (kind == kMaxThreadsPerBlock) *result = int(kMaxThreads);
    if (kind == kWarpSize) *result = 32;
    if (kind == kTotalGlobalMemory) *result = kMemory;
  }
  void* AllocDataSpace(tvm::Device, size_t size, size_t, DLDataType) final {
    auto* made = new Buffer(size);
    live.insert(made);
    return made;
  }
  void FreeDataSpace(tvm::Device, void* data) final {
    TVM_FFI_ICHECK(live.erase((Buffer*)data)) << "no buffer of the device";
    delete (Buffer*)data;
  }
  void* AllocWorkspace(tvm::Device device, size_t size, DLDataType type) final {
    return AllocDataSpace(device, size, 0, type);
  }
  void FreeWorkspace(tvm::Device device, void* data) final { FreeDataSpace(device, data); }
  void StreamSync(tvm::Device, TVMStreamHandle) final {}
  using DeviceAPI::AllocDataSpace;

  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t size, tvm::Device source,
                      tvm::Device target, DLDataType, TVMStreamHandle) final {
    auto place = [&](const void* data, size_t offset, tvm::Device device) {
      return device.device_type == kDLMetal ? At(data, offset, size) : (char*)data + offset;
    };
    memmove(place(to, to_offset, target), place(from, from_offset, source), size);
  }
};

class Module final : public ffi::ModuleObj {
 public:
  Module(ffi::Map<ffi::String, ffi::String> sources, ffi::Map<ffi::String, FunctionInfo> functions)
      : sources_(std::move(sources)), functions_(std::move(functions)) {}

  const char* kind() const final { return "metal"; }
  int GetPropertyMask() const final { return ffi::Module::kRunnable; }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto info = functions_.Get(name);
    if (!info.has_value()) return std::nullopt;
    auto types = info.value()->arg_types;
    size_t buffers = NumBufferArgs(types), numbers = types.size() - buffers;
    TVM_FFI_ICHECK_LE(buffers + (numbers ? 1 : 0), kMaxBuffers) << "too many buffers of " << name;
    LaunchParamConfig config;
    config.Init(types.size(), info.value()->launch_param_tags);
    auto function = Find(name);
    auto self = ffi::GetObjectPtr<ffi::Object>(this);
    auto call = [function, config, buffers, self](ffi::PackedArgs args, ffi::Any*, const ArgUnion64* numbers) {
      std::vector<void*> arguments;
      for (size_t i = 0; i < buffers; ++i) arguments.push_back(Api::Get()->At(args[int(i)].cast<void*>(), 0, 0));
      arguments.push_back((void*)numbers);
      ThreadWorkLoad load = config.Extract(args);
      auto size = [&](int at) { return unsigned(load.work_size[at]); };
      gridDim = {size(0), size(1), size(2)};
      blockDim = {size(3), size(4), size(5)};
      TVM_FFI_ICHECK_LE(load.block_dim(0) * load.block_dim(1) * load.block_dim(2), kMaxThreads);
      launch(*function, arguments.data());
    };
    return PackFuncNonBufferArg(call, types);
  }

 private:
  std::shared_ptr<Function> Find(const ffi::String& name) {
    if (!library_) {
      auto path = ffi::Function::GetGlobalRequired("emulated_metal.compile")(sources_).cast<ffi::String>();
      library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      TVM_FFI_ICHECK(library_) << dlerror();
    }
    std::string text(name.data(), name.size());
    auto* call = (void (*)(void**))dlsym(library_, ("emulated_" + text).c_str());
    auto* waits = (const int*)dlsym(library_, ("emulated_waits_" + text).c_str());
    TVM_FFI_ICHECK(call && waits) << "no kernel " << text;
    auto* forget = (void (*)())dlsym(library_, "emulated_forget");
    return std::make_shared<Function>(Function{text, call, *waits != 0, forget});
  }

  ffi::Map<ffi::String, ffi::String> sources_;
  ffi::Map<ffi::String, FunctionInfo> functions_;
  void* library_ = nullptr;
};

ffi::Module Load(const ffi::Bytes& bytes) {
  tvm::support::BytesInStream stream(bytes);
  ffi::String format;
  ffi::Map<ffi::String, FunctionInfo> functions;
  ffi::Map<ffi::String, ffi::String> sources;
  TVM_FFI_ICHECK(stream.Read(&format) && stream.Read(&functions) && stream.Read(&sources));
  TVM_FFI_ICHECK(std::string(format.data(), format.size()) == "metal") << "no source of Metal";
  return ffi::Module(ffi::make_object<Module>(std::move(sources), std::move(functions)));
}

// What TVM's code generator calls, where there is a runtime.
ffi::Module Create(ffi::Map<ffi::String, ffi::Bytes> sources, const ffi::String& format,
                   ffi::Map<ffi::String, FunctionInfo> functions, ffi::Map<ffi::String, ffi::String>) {
  TVM_FFI_ICHECK(std::string(format.data(), format.size()) == "metal") << "no source of Metal";
  ffi::Map<ffi::String, ffi::String> texts;
  for (auto [name, source] : sources) texts.Set(name, ffi::String(source.data(), source.size()));
  return ffi::Module(ffi::make_object<Module>(std::move(texts), std::move(functions)));
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def_packed("device_api.metal",
                  [](ffi::PackedArgs, ffi::Any* result) {
                    DeviceAPI* api = Api::Get();  // the base first: void* has no bases
                    *result = static_cast<void*>(api);
                  })
      .def("ffi.Module.create.metal", Create)
      .def("ffi.Module.load_from_bytes.metal", Load);
}
