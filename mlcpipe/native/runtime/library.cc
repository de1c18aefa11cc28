#include "library.h"

#include <sys/stat.h>
#include <tvm/runtime/memory/memory_manager.h>

#include <map>
#include <mutex>
#include <tuple>

#include "host.h"
#include "workspace.h"

namespace mlcpipe {
namespace {

using tvm::ffi::Function;
using tvm::ffi::Module;
using tvm::ffi::String;

std::vector<std::string> MissingFeatures(const VariantInfo& variant) {
  std::vector<std::string> missing;
  for (const std::string& feature : variant.features) {
    if (!HostFeatures().count(feature)) missing.push_back(feature);
  }
  return missing;
}

std::string Joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// A library as a module, the same one for the same file: TVM's code keeps what it calls in variables of the library,
// which the system loads once however often it is asked to. So none is ever closed.
Module LoadOnce(const std::string& path, const mlcpipe_symbol* code) {
  using Identity = std::tuple<const void*, dev_t, ino_t, off_t, int64_t, int64_t>;
  static auto* const loaded = new std::map<Identity, Module>();
  static auto* const mutex = new std::mutex();
  struct stat status {};
  if (!code && stat(path.c_str(), &status) != 0) throw Error(Code::kBundle, "the library is missing").Where(path);
#if defined(__APPLE__)
  const timespec changed = status.st_mtimespec;
#else
  const timespec changed = status.st_mtim;
#endif
  const Identity identity(code, status.st_dev, status.st_ino, status.st_size, changed.tv_sec, changed.tv_nsec);
  const std::lock_guard<std::mutex> lock(*mutex);
  auto found = loaded->find(identity);
  if (found == loaded->end()) {
    UseOwnWorkspaces();
    static const Function load = Function::GetGlobalRequired("ffi.Module.load_from_file.so");
    const Module module = code ? StaticModule(code) : load(String(path), String("")).cast<Module>();
    found = loaded->emplace(identity, module).first;
  }
  return found->second;
}

// The virtual machine's executable of a variant, which has a function that marks it.
Module FindExecutable(const Module& module, const std::string& variant) {
  std::vector<Module> candidates{module};
  for (const tvm::ffi::Any& imported : module->imports()) candidates.push_back(imported.cast<Module>());
  for (const Module& candidate : candidates) {
    if (std::string(candidate->kind()) != "relax.VMExecutable") continue;
    const auto has = candidate->GetFunction("has_function");
    if (has && (*has)(String("_mlcpipe_variant_" + variant)).cast<bool>()) return candidate;
  }
  throw Error(Code::kBundle, "the compiled library lacks a variant").Expected(variant).Next("compile the model again");
}

// With memory from a pool of the process, which keeps what was freed, by size. One at a time: TVM's virtual machine
// changes a table of its executable, which is that of all engines with this code.
Module MakeMachine(const Module& executable, const Device& device) {
  static auto* const mutex = new std::mutex();
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto load = executable->GetFunction("vm_load_executable");
  Module machine = load.value()().cast<Module>();
  const Function start = machine->GetFunction("vm_initialization").value();
  const int host = kDLCPU, type = device.handle.device_type, pooled = tvm::runtime::memory::kPooled;
  if (device.on_host()) {
    start(host, 0, pooled);
  } else {
    start(type, device.handle.device_id, pooled, host, 0, pooled);
  }
  return machine;
}

// Of the code, for errors too.
std::string PathOf(const Manifest& manifest, const mlcpipe_symbol* code) {
  if (code) return "the program";
  if (!manifest.library.empty()) return manifest.source.where() + "/" + manifest.library;
  throw Error(Code::kBundle, "the bundle has no code for this program")
      .Where(manifest.source.where())
      .Expected("a program with the model's static library, or a bundle with one file in lib/");
}

template <typename Make>
Module Loaded(const std::string& path, Make make) {
  try {
    return make();
  } catch (const tvm::ffi::Error& error) {
    throw FromTvm(error, Code::kBundle, "the compiled library does not load")
        .Where(path)
        .Next("compile the model again on this machine");
  }
}

}  // namespace

Error FromTvm(const tvm::ffi::Error& error, Code code, std::string what) {
  const std::string message = error.message();
  const size_t colon = message.find(": ");  // of a GPU's error: mlcpipe/native/{vulkan,metal}/error.h
  if (colon != std::string::npos && colon && IsKind(message.substr(0, colon))) {
    return Error(error.kind() == "MemoryError" ? Code::kResource : Code::kTarget, message.substr(colon + 2));
  }
  if (error.kind() == "MemoryError" || message.find("alloc") != std::string::npos) {
    return Error(Code::kResource, "the system gives no more memory")
        .Found(message)
        .Next("close other programs, or use a smaller model or context");
  }
  return Error(code, std::move(what)).Found(message);
}

const VariantInfo& ChooseVariant(const Manifest& manifest, const std::string& wanted) {
  std::vector<std::string> names;
  for (const VariantInfo& variant : manifest.variants) {
    const bool asked = variant.name == wanted;
    const auto missing = MissingFeatures(variant);
    if (missing.empty() && (asked || wanted.empty())) return variant;
    if (asked) {
      throw Error(Code::kUsage, "this CPU cannot run the variant " + wanted).Expected("a CPU with " + Joined(missing));
    }
    names.push_back(variant.name);
  }
  if (!wanted.empty()) throw Error(Code::kUsage, "no such variant").Expected(Joined(names)).Found(wanted);
  throw Error(Code::kTarget, "the bundle was made for a CPU with more instructions")
      .Where(manifest.source.where())
      .Expected("this CPU to have " + Joined(MissingFeatures(manifest.variants.back())))
      .Found("variants " + Joined(names))
      .Next("compile the model again with --target cpu");
}

Library::Library(const Manifest& manifest, const std::string& variant, const mlcpipe_symbol* code,
                 const Device& device)
    : path_(PathOf(manifest, code)),
      variant_(variant),
      module_(Loaded(path_, [&] { return LoadOnce(path_, code); })),
      executable_(FindExecutable(module_, variant)),
      machine_(Loaded(path_, [&] { return MakeMachine(executable_, device); })) {
  std::string metadata;
  try {
    metadata = Get("_metadata")().cast<String>();
  } catch (const tvm::ffi::Error& error) {
    throw FromTvm(error, Code::kBundle, "the compiled library does not say what it is").Where(path_);
  }
  manifest.CheckAgrees(metadata);
}

Function Library::Get(const std::string& name) const {
  if (auto function = machine_->GetFunction(name)) return *function;
  const bool alone = executable_.same_as(module_);
  const std::string symbol = alone ? name : "mlcpipe_" + variant_ + "_" + name;
  for (const Module& from : {module_, executable_}) {
    if (auto function = from->GetFunction(symbol)) return *function;
    for (const tvm::ffi::Any& imported : from->imports()) {
      if (auto function = imported.cast<Module>()->GetFunction(symbol)) return *function;
    }
  }
  throw Error(Code::kBundle, "the compiled library lacks a function").Where(path_).Expected(name);
}

}  // namespace mlcpipe
