#include "kernel.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "adapter.h"
#include "commands.h"
#include "error.h"

namespace mlcpipe::vulkan {
namespace {

namespace json = tvm::ffi::json;

constexpr uint64_t kMaxHeaderBytes = uint64_t{64} << 20;
constexpr int kMaxDepth = 8;
constexpr int64_t kMaxArguments = 256, kMaxSharedBytes = 1 << 24, kMaxThreads = 4096;

[[noreturn]] void Refuse(const std::string& what) {
  Fail("a module that cannot be loaded: " + what + "; compile the model again with this mlcpipe");
}

const std::map<std::string, ScalarType>& StoredTypes() {
  static const auto* types = new std::map<std::string, ScalarType>{
      {"int32", ScalarType::kI32},  {"uint32", ScalarType::kU32},   {"int64", ScalarType::kI64},
      {"uint64", ScalarType::kU64}, {"float32", ScalarType::kF32}, {"float64", ScalarType::kF64},
  };
  return *types;
}

const char* const kLaunch[] = {"blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z"};

// Reads an object's fields and checks their types. Errors name the field.
class Fields {
 public:
  Fields(const json::Value& value, std::string where) : where_(std::move(where)) {
    auto object = value.as<json::Object>();
    if (!object.has_value()) Refuse(where_ + " is no object");
    object_ = *object;
  }

  bool Has(const char* name) const { return object_.count(tvm::ffi::String(name)) != 0; }

  json::Value Get(const char* name) const {
    auto found = object_.find(tvm::ffi::String(name));
    if (found == object_.end()) Refuse(where_ + " has no " + name);
    return (*found).second;
  }

  int64_t Int(const char* name, int64_t low, int64_t high) const { return ToInt(Get(name), name, low, high); }

  int64_t ToInt(const json::Value& value, const char* name, int64_t low, int64_t high) const {
    const bool is_integer = value.type_index() == TVMFFITypeIndex::kTVMFFIInt;
    const int64_t number = is_integer ? value.cast<int64_t>() : low - 1;
    if (number < low || number > high) {
      Refuse(where_ + ": " + name + " is no integer from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return number;
  }

  bool Bool(const char* name) const {
    json::Value value = Get(name);
    if (value.type_index() != TVMFFITypeIndex::kTVMFFIBool) Refuse(where_ + ": " + name + " is no boolean");
    return value.cast<bool>();
  }

  std::string Text(const char* name) const { return ToText(Get(name), name); }

  std::string ToText(const json::Value& value, const char* name) const {
    auto text = value.as<tvm::ffi::String>();
    constexpr size_t kLongest = 4096;
    if (!text.has_value() || text->size() == 0 || text->size() > kLongest) Refuse(where_ + ": " + name + " is no text");
    std::string result(text->data(), text->size());
    const bool plain = std::all_of(result.begin(), result.end(), [](char c) { return c >= ' ' && c <= '~'; });
    if (!plain) Refuse(where_ + ": " + name + " is no text");
    return result;
  }

  json::Array List(const char* name, size_t most) const {
    auto list = Get(name).as<json::Array>();
    if (!list.has_value() || list->size() > most) Refuse(where_ + ": " + name + " is no list, or too long");
    return *list;
  }

  const std::string& where() const { return where_; }

 private:
  json::Object object_;
  std::string where_;
};

// The parser is recursive, so the depth of nesting is checked first.
void CheckDepth(const char* text, size_t size) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < size; ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxDepth) Refuse("its header is nested too deep");
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
}

void ReadArguments(const Fields& fields, Kernel* kernel) {
  std::set<uint32_t> positions;
  auto position = [&](const Fields& argument) {
    const auto at = static_cast<uint32_t>(argument.Int("arg", 0, kMaxArguments - 1));
    if (!positions.insert(at).second) Refuse(fields.where() + " names an argument twice");
    return at;
  };
  kernel->push_bytes = static_cast<uint32_t>(fields.Int("push_constant_bytes", 0, kMaxPushBytes));
  if (kernel->push_bytes % 4 != 0) Refuse(fields.where() + ": push_constant_bytes is no multiple of 4");
  for (const json::Value& value : fields.List("buffers", Commands::kMaxBuffers)) {
    const Fields buffer(value, fields.where() + ", a buffer");
    kernel->buffers.push_back({position(buffer), buffer.Bool("write")});
  }
  for (const json::Value& value : fields.List("scalars", kMaxArguments)) {
    const Fields scalar(value, fields.where() + ", a scalar");
    auto type = StoredTypes().find(scalar.Text(scalar.Has("stored") ? "stored" : "dtype"));
    if (type == StoredTypes().end()) Refuse(fields.where() + " has a scalar of an unknown type");
    const uint32_t bytes = ScalarBytes(type->second);
    const int64_t last = static_cast<int64_t>(kernel->push_bytes) - bytes;
    kernel->scalars.push_back({position(scalar), type->second, static_cast<uint32_t>(scalar.Int("offset", 0, last))});
  }
  kernel->argument_count = static_cast<uint32_t>(positions.size());
  if (!positions.empty() && *positions.rbegin() + 1 != positions.size()) {
    Refuse(fields.where() + " does not name all of its arguments");
  }
}

void ReadLaunch(const Fields& fields, Kernel* kernel) {
  json::Array workgroup = fields.List("workgroup", 3);
  if (workgroup.size() != 3) Refuse(fields.where() + ": workgroup has not three numbers");
  int64_t threads = 1;
  for (int i = 0; i < 3; ++i) {
    kernel->workgroup[i] = static_cast<uint32_t>(fields.ToInt(workgroup[i], "workgroup", 1, kMaxThreads));
    threads *= kernel->workgroup[i];
  }
  if (threads > kMaxThreads) Refuse(fields.where() + " has more than " + std::to_string(kMaxThreads) + " threads");
  kernel->shared_bytes = static_cast<uint32_t>(fields.Int("shared_bytes", 0, kMaxSharedBytes));
  kernel->subgroup_size = static_cast<uint32_t>(fields.Int("subgroup_size", 0, 1024));
  if ((kernel->subgroup_size & (kernel->subgroup_size - 1)) != 0) {
    Refuse(fields.where() + ": subgroup_size is no power of two");
  }
  const bool whole = kernel->subgroup_size != 0 && kernel->workgroup[0] % kernel->subgroup_size == 0;
  kernel->full_subgroups = fields.Has("full_subgroups") ? fields.Bool("full_subgroups") : whole;
  if (kernel->full_subgroups && !whole) Refuse(fields.where() + " cannot have full subgroups");
  std::set<std::string> seen;
  for (const json::Value& value : fields.List("launch_params", 6)) {
    const std::string name = fields.ToText(value, "launch_params");
    auto found = std::find(std::begin(kLaunch), std::end(kLaunch), name);
    if (found == std::end(kLaunch) || !seen.insert(name).second) {
      Refuse(fields.where() + " has an unknown launch parameter " + name);
    }
    kernel->launch.push_back(static_cast<uint8_t>(found - std::begin(kLaunch)));
  }
  if (!fields.Has("grid_base") || fields.Get("grid_base").type_index() == TVMFFITypeIndex::kTVMFFINone) return;
  const Fields base(fields.Get("grid_base"), fields.where() + ", grid_base");
  kernel->grid_base_offset = static_cast<int32_t>(base.Int("offset", 0, int64_t{kernel->push_bytes} - 4));
  if (kernel->grid_base_offset % 4 != 0) Refuse(base.where() + " is no multiple of 4");
}

Kernel ReadKernel(const json::Value& value, const char* code, size_t code_bytes) {
  Kernel kernel;
  kernel.name = Fields(value, "a kernel").Text("name");
  const Fields fields(value, "kernel " + kernel.name.substr(0, 80));
  kernel.entry = fields.Text("entry");
  ReadArguments(fields, &kernel);
  ReadLaunch(fields, &kernel);
  for (const json::Value& name : fields.List("features", 64)) {
    kernel.features.push_back(fields.ToText(name, "features"));
    if (Adapter::known_features().count(kernel.features.back()) == 0) {
      Refuse(fields.where() + " needs " + kernel.features.back() + ", which this mlcpipe does not know");
    }
  }
  const auto offset = static_cast<size_t>(fields.Int("spirv_offset", 0, static_cast<int64_t>(code_bytes)));
  kernel.code_bytes = static_cast<size_t>(fields.Int("spirv_bytes", 0, static_cast<int64_t>(code_bytes - offset)));
  if (offset % 4 != 0 || kernel.code_bytes % 4 != 0) Refuse(fields.where() + ": its code is not aligned to words");
  kernel.code = reinterpret_cast<const uint32_t*>(code + offset);
  const std::string problem = FindSpirvProblem(kernel.code, kernel.code_bytes / 4, kernel.entry);
  if (!problem.empty()) Refuse(fields.where() + ": " + problem);
  return kernel;
}

}  // namespace

uint32_t ScalarBytes(ScalarType type) {
  return type == ScalarType::kI32 || type == ScalarType::kU32 || type == ScalarType::kF32 ? 4 : 8;
}

std::vector<Kernel> ReadKernels(const char* bytes, size_t size) {
  uint64_t header = 0;
  if (size < sizeof header) Refuse("it is too short");
  std::memcpy(&header, bytes, sizeof header);
  if (header > kMaxHeaderBytes || header > size - sizeof header || header % 8 != 0) Refuse("its header does not fit");
  const char* text = bytes + sizeof header;
  CheckDepth(text, header);
  tvm::ffi::String problem;
  const json::Value value = json::Parse(tvm::ffi::String(text, header), &problem);
  if (problem.size() != 0) Refuse("its header is no JSON");
  const Fields fields(value, "the header");
  if (fields.Int("format", 0, INT32_MAX) != 1) Refuse("it has another format");
  constexpr size_t kMaxKernels = 65536;
  std::vector<Kernel> kernels;
  std::set<std::string> names;
  for (const json::Value& entry : fields.List("kernels", kMaxKernels)) {
    kernels.push_back(ReadKernel(entry, text + header, size - sizeof header - header));
    if (!names.insert(kernels.back().name).second) Refuse("two kernels have the same name");
  }
  return kernels;
}

}  // namespace mlcpipe::vulkan
