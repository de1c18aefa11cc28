#include "library.h"

#include <tvm/runtime/memory/memory_manager.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

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

// A file that only this process knows, while it is open.
struct Copy {
  std::string path;
  int descriptor = -1;
  bool on_disk = false;

  ~Copy() {
    if (on_disk) unlink(path.c_str());
    if (descriptor >= 0) close(descriptor);
  }
};

// The system takes a file for a library that it has if the path or the inode is that one's, whatever the file holds by
// now (dlopen). So it gets a copy: a bundle may be replaced, or its files written over, while its code runs. The copy is
// in memory where the system can: many forbid code in the folder of temporary files (noexec), Android has none.
Module LoadCopy(const std::string& library) {
  Copy copy;
#if defined(__linux__)
  copy.descriptor = static_cast<int>(syscall(SYS_memfd_create, "model.so", 1u));  // MFD_CLOEXEC; older C libraries lack it
  copy.path = "/proc/self/fd/" + std::to_string(copy.descriptor);
#endif
  if (copy.descriptor < 0) {
    const char* const folder = std::getenv("TMPDIR");
    copy.path = std::string(folder ? folder : "/tmp") + "/mlcpipe-XXXXXX";
    copy.descriptor = mkstemp(copy.path.data());
    copy.on_disk = copy.descriptor >= 0;
    // A file of that name from elsewhere is never run.
    if (!copy.on_disk) throw Error(Code::kResource, "a copy of the library cannot be kept").Where(copy.path);
  }
  std::ofstream file(copy.path, std::ios::binary);
  file.write(library.data(), static_cast<std::streamsize>(library.size()));
  file.close();
  if (!file) throw Error(Code::kResource, "a copy of the library cannot be kept").Where(copy.path);
  static const Function load = Function::GetGlobalRequired("ffi.Module.load_from_file.so");
  const Module module = load(String(copy.path), String("")).cast<Module>();
  copy.descriptor = -1;  // stays open: the next copy has another name
  return module;
}

// A library as a module, the same one for the same bytes at the same path; none is ever closed.
Module LoadOnce(const Manifest& manifest, const mlcpipe_symbol* code) {
  static auto* const loaded = new std::map<std::pair<const void*, std::string>, Module>();
  static auto* const mutex = new std::mutex();
  std::string library, key;
  if (!code) {
    library = manifest.source.Open(manifest.library).text();
    const std::string hash = Sha256(library), &checked = manifest.files.at(manifest.library).sha256;
    if (hash != checked) throw manifest.source.Changed(manifest.library, "sha256 " + checked, hash);
    key = manifest.source.where() + " " + hash;
  }
  const std::lock_guard<std::mutex> lock(*mutex);
  auto found = loaded->find({code, key});
  if (found == loaded->end()) {
    UseOwnWorkspaces();
    found = loaded->emplace(std::make_pair(code, key), code ? StaticModule(code) : LoadCopy(library)).first;
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
      module_(Loaded(path_, [&] { return LoadOnce(manifest, code); })),
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
