#include "manifest.h"

#include <algorithm>

#ifndef MLCPIPE_ABI
#error "MLCPIPE_ABI and MLCPIPE_FORMAT_VERSION are what mlcpipe/bundle/manifest.py says"
#endif

namespace mlcpipe {
namespace {

constexpr char kManifest[] = "mlcpipe.json";
// In addition to the library and the weights; a bundle's other files are for Python and for MLC's hosts.
constexpr const char* kRead[] = {"tensor-cache.json", "tokenizer.bin", "template.bin"};
constexpr uint64_t kMaxManifestBytes = 8 << 20;
constexpr int64_t kMaxExtent = INT32_MAX;
constexpr size_t kMaxStates = 10'000, kMaxParts = 64, kMaxGroups = 16;
// Linux x86-64, 2026-11: what else a run takes, TVM's objects and the library's code, with a margin.
#if defined(__x86_64__)
constexpr const char* kArchitectures[] = {"x86_64", "amd64"};
#elif defined(__aarch64__)
constexpr const char* kArchitectures[] = {"aarch64", "arm64"};
#else
constexpr const char* kArchitectures[] = {"riscv64"};
#endif
#if defined(__APPLE__)
constexpr char kSystem[] = "ios";
#else
constexpr char kSystem[] = "linux";
#endif

// A container may have a manifest for each of several architectures.
std::string NameFor(const Files& source) {
  const std::string own = std::string("mlcpipe-") + kArchitectures[0] + ".json";
  return !source.HasCode() && source.Has(own) ? own : kManifest;
}

JsonObject Read(const Files& source) {
  const MappedFile file = source.Open(NameFor(source), kMaxManifestBytes);
  JsonObject json = JsonObject::Parse(file.text(), source.where() + "/" + kManifest);
  json.Int("format_version", MLCPIPE_FORMAT_VERSION, MLCPIPE_FORMAT_VERSION);
  if (const std::string abi = json.Text("abi"); abi != MLCPIPE_ABI) {
    throw Error(Code::kBundle, "the bundle was compiled for another version of mlcpipe or TVM")
        .Where(source.where())
        .Expected("ABI " + std::string(MLCPIPE_ABI).substr(0, 12))
        .Found(abi.substr(0, 12))
        .Next("compile the model again");
  }
  return json;
}

int64_t ItemBytes(const JsonObject& json) {
  constexpr std::pair<const char*, int64_t> kItemBytes[] = {{"float32", 4}, {"float16", 2}, {"int8", 1}};
  const std::string dtype = json.Text("dtype");
  for (const auto& [name, bytes] : kItemBytes) {
    if (dtype == name) return bytes;
  }
  throw json.Wrong("dtype", "float32, float16 or int8").Found(dtype);
}

// A product of bytes, which a unit has room for.
int64_t Times(const JsonObject& json, const char* key, int64_t bytes, int64_t count) {
  if (bytes > kMaxExtent / count) throw json.Wrong(key, "at most " + std::to_string(kMaxExtent) + " bytes");
  return bytes * count;
}

StatePart ReadPart(const JsonObject& json, bool paged) {
  StatePart part{json.Text("name"), json.Text("dtype"), json.Ints("shape", 1, kMaxExtent), kNoUnit, ItemBytes(json)};
  for (const int64_t extent : part.shape) part.bytes = Times(json, "shape", part.bytes, extent);
  if (!paged && json.IsNull("token_axis")) return part;
  if (!paged || part.shape.empty()) throw json.Wrong(paged ? "shape" : "token_axis", paged ? "an axis of tokens" : "null");
  part.token_axis = json.Int("token_axis", 0, static_cast<int64_t>(part.shape.size()) - 1);
  if (part.shape[static_cast<size_t>(part.token_axis)] == kPage) return part;
  throw json.Wrong("token_axis", "an axis of " + std::to_string(kPage) + " tokens");
}

State ReadState(const JsonObject& json) {
  const std::string kind = json.Text("kind");
  const bool paged = kind == "pages";
  if (!paged && kind != "slot") throw json.Wrong("kind", "pages or slot").Found(kind);
  State state{json.Text("name"), json.Text("dtype"), paged, json.Int("window", 0, paged ? kMaxExtent : 0),
              json.Int("copies", 1, kMaxExtent), {}, ItemBytes(json), 0};
  for (const JsonObject& part : json.Objects("parts")) {
    if (state.parts.size() == kMaxParts) throw json.Wrong("parts", "at most " + std::to_string(kMaxParts));
    state.parts.push_back(ReadPart(part, paged));
    state.unit_bytes += state.parts.back().bytes;
  }
  state.unit_bytes = Times(json, "copies", state.unit_bytes, state.copies);
  if (state.unit_bytes && state.unit_bytes % state.item_bytes == 0) return state;
  throw json.Wrong("parts", "arrays of whole elements of " + state.dtype);
}

}  // namespace

Manifest::Manifest(const Files& source) : source(source), json_(Read(source)) {
  ReadTarget();
  ReadModel();
  ReadMemoryPlan();
  ReadParams();
  ReadFiles();
}

void Manifest::ReadTarget() {
  const JsonObject target = json_.Object("target");
  const std::string triple = target.Text("triple");
  const std::string architecture = triple.substr(0, triple.find('-'));
  const bool known = std::find(std::begin(kArchitectures), std::end(kArchitectures), architecture) !=
                     std::end(kArchitectures);
  if (!known || triple.find(kSystem) == std::string::npos) {
    throw Error(Code::kTarget, "the bundle was made for another system")
        .Where(source.where())
        .Expected(std::string(kArchitectures[0]) + " " + kSystem)
        .Found(triple)
        .Next("compile the model for this system");
  }
  for (const JsonObject& variant : target.Objects("variants")) {
    const auto compiled = JsonObject::Parse(variant.Text("tvm_target"), source.where() + "/" + kManifest + " tvm_target");
    const std::string compiler = compiled.Text("kind"), kind = compiler == "llvm" ? "cpu" : compiler;
    if (!variant.IsNull("library")) {
      throw Error(Code::kTarget, "the bundle has several libraries")
          .Where(source.where())
          .Expected("one")
          .Next("compile the model with --target cpu");
    }
    variants.push_back({variant.Text("name"), kind, variant.Texts("features"), std::nullopt});
    if (!variant.Has("scratch") || variant.IsNull("scratch")) continue;
    const JsonObject scratch = variant.Object("scratch");
    variants.back().scratch = {scratch.Int("caller", 0, kMaxBytes), scratch.Int("helper", 0, kMaxBytes)};
  }
  if (variants.empty()) throw target.Wrong("variants", "one or more");
}

void Manifest::ReadModel() {
  const JsonObject json = json_.Object("model");
  const auto extent = [&](const char* key) { return json.Int(key, 1, kMaxExtent); };
  model = {extent("vocab_size"),    extent("context_length"),
           extent("prefill_chunk"), extent("max_batch"),
           json.OptionalInt("recompute_above", 1, kMaxExtent),
           json.OptionalInt("rope_above", 1, kMaxExtent),
           json.Text("dtype"),      json.Text("kv_dtype"), std::nullopt};
  if (json.Has("eagle") && !json.IsNull("eagle")) {
    const JsonObject head = json.Object("eagle");
    const auto size = [&](const char* key) { return head.Int(key, 1, kMaxExtent); };
    model.draft_head = {size("hidden_size"), size("page_bytes"), size("kept")};
  }
  identity = Sha256(json_.Text("checkpoint_hash") + " " + json_.Text("quantization"));
  if (json.Text("kv_cache") != "pages") {
    throw Error(Code::kTarget, "the bundle's KV cache is TVM's").Where(source.where()).Next("compile the model again");
  }
  std::vector<State> read;
  for (const JsonObject& state : json_.Objects("states")) read.push_back(ReadState(state));
  if (read.empty() || read.size() > kMaxStates) throw json_.Wrong("states", "1 to " + std::to_string(kMaxStates));
  states = StateTable(std::move(read));
  if (states.windows().size() > kMaxGroups) throw json_.Wrong("states", std::to_string(kMaxGroups) + " windows or less");
}

void Manifest::ReadMemoryPlan() {
  const JsonObject memory = json_.Object("memory_plan");
  const auto bytes = [&](const char* key) { return memory.Int(key, 0, kMaxBytes); };
  plan = {bytes("weights_bytes"), bytes("weights_bytes"), 0, 0};
  if (!memory.IsNull("decode_weights_bytes")) plan.decode_weights_bytes = bytes("decode_weights_bytes");
  const JsonObject workspaces = memory.Object("workspace_bytes");
  const std::pair<const char*, int64_t*> functions[] = {{"decode", &plan.decode_bytes}, {"prefill", &plan.prefill_bytes}};
  for (const auto& [name, workspace] : functions) {
    if (workspaces.Has(name)) *workspace = workspaces.Int(name, 0, kMaxBytes);
  }
}

void Manifest::ReadParams() {
  for (const JsonObject& param : json_.Objects("params")) {
    params.push_back({param.Text("name"), param.Text("dtype"), param.Ints("shape", 1, kMaxExtent)});
  }
  const JsonObject model = json_.Object("model");
  for (const std::string& name : model.Has("gathered") ? model.Texts("gathered") : std::vector<std::string>()) {
    const auto param = std::find_if(params.begin(), params.end(), [&](const ParamInfo& p) { return p.name == name; });
    const auto place = static_cast<size_t>(param - params.begin());
    const bool again = std::find(gathered.begin(), gathered.end(), place) != gathered.end();
    if (param == params.end() || param->shape.size() != 2 || again) {
      throw model.Wrong("gathered", "parameters that are matrices, each once").Found(name);
    }
    gathered.push_back(place);
  }
}

void Manifest::ReadFiles() {
  const JsonObject listed = json_.Object("files");
  for (const std::string& path : listed.Keys()) {
    if (!IsInside(path)) throw listed.Wrong(path, "a relative path with forward slashes and no '..'");
    const JsonObject info = listed.Object(path.c_str());
    files[path] = {info.Text("sha256"), static_cast<uint64_t>(info.Int("bytes", 0, kMaxBytes))};
    const bool archive = path.size() > 2 && path.compare(path.size() - 2, 2, ".a") == 0;
    if (path.rfind("lib/", 0) != 0 || archive) continue;
    if (!library.empty()) throw listed.Wrong("lib/", "one file");
    library = path;
  }
  if (!source.HasCode()) library.clear();
}

void Manifest::Verify(const std::vector<std::string>& shards) const {
  for (const auto& [path, info] : files) {
    const bool is_shard = std::find(shards.begin(), shards.end(), path) != shards.end();
    const bool is_read = path == library || std::find(std::begin(kRead), std::end(kRead), path) != std::end(kRead);
    if (!is_shard && !is_read) continue;
    const MappedFile file = source.Open(path);
    if (file.bytes() != info.bytes) {
      throw source.Changed(path, std::to_string(info.bytes) + " bytes", std::to_string(file.bytes()));
    }
    if (is_shard) continue;
    if (const std::string hash = Sha256(file.text()); hash != info.sha256) {
      throw source.Changed(path, "sha256 " + info.sha256, hash);
    }
  }
}

void Manifest::CheckAgrees(const std::string& metadata) const {
  const JsonObject stated = JsonObject::Parse(metadata, source.where() + "/" + library + " _metadata");
  const auto differ = [&](const std::string& field) {
    return Error(Code::kBundle, "manifest and library differ in " + field)
        .Where(source.where())
        .Next(library.empty() ? "give mlcpipe_options.code of this model" : "compile the model again");
  };
  const JsonObject ours = json_.Object("model"), theirs = stated.Object("model");
  for (const std::string& key : ours.Keys()) {
    if (!ours.SameField(key.c_str(), theirs)) throw differ(key);
  }
  for (const char* field : {"memory_plan", "states"}) {
    if (!json_.SameField(field, stated)) throw differ(field);
  }
  const std::pair<const char*, std::vector<const char*>> lists[] = {{"params", {"name", "shape", "dtype"}},
                                                                    {"variants", {"name", "features"}}};
  for (const auto& [name, fields] : lists) {
    const auto one = name == std::string("params") ? json_.Objects(name) : json_.Object("target").Objects(name);
    const auto other = stated.Objects(name);
    if (one.size() != other.size()) throw differ(name);
    for (size_t i = 0; i < one.size(); ++i) {
      for (const char* field : fields) {
        if (!one[i].SameField(field, other[i])) throw differ(name);
      }
    }
  }
}

}  // namespace mlcpipe
