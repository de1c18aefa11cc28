#include "weights.h"

#include <algorithm>
#include <cstdint>

namespace mlcpipe {
namespace {

constexpr char kIndex[] = "tensor-cache.json";
constexpr uint64_t kMaxIndexBytes = 16 << 20;
constexpr int64_t kAlignment = 64;
constexpr size_t kMaxDimensions = 8;

struct Dtype {
  const char* name;
  DLDataType value;
};

constexpr Dtype kDtypes[] = {{"float16", {kDLFloat, 16, 1}}, {"float32", {kDLFloat, 32, 1}},
                             {"uint32", {kDLUInt, 32, 1}},   {"int32", {kDLInt, 32, 1}},
                             {"int8", {kDLInt, 8, 1}},       {"uint8", {kDLUInt, 8, 1}}};

// A tensor's memory: a part of a mapped file.
struct MappedMemory {
  MappedFile file;
  uint64_t offset;

  void AllocData(DLTensor* tensor) { tensor->data = const_cast<uint8_t*>(file.data()) + offset; }
  void FreeData(DLTensor*) {}
};

}  // namespace

WeightIndex::WeightIndex(const Manifest& manifest) : manifest_(manifest) {
  const MappedFile file = manifest.source.Open(kIndex, kMaxIndexBytes);
  const JsonObject json = JsonObject::Parse(file.text(), manifest.source.where() + "/" + kIndex);
  tensors_.resize(manifest.params.size());
  for (const JsonObject& shard : json.Objects("records")) ReadShard(shard);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].param) throw json.Wrong(manifest.params[i].name, "a tensor of this name").Found("none");
  }
}

void WeightIndex::ReadShard(const JsonObject& json) {
  const std::string name = json.Text("dataPath");
  const auto bytes = static_cast<uint64_t>(json.Int("nbytes", 1, kMaxBytes));
  const auto listed = manifest_.files.find(name);
  if (listed == manifest_.files.end() || listed->second.bytes != bytes || name.find('/') != std::string::npos) {
    throw json.Wrong("dataPath", "a file of the manifest with " + std::to_string(bytes) + " bytes").Found(name);
  }
  shards_.push_back({name, bytes});
  std::vector<std::pair<int64_t, JsonObject>> records;
  for (const JsonObject& record : json.Objects("records")) {
    records.emplace_back(record.Int("byteOffset", 0, kMaxBytes), record);
  }
  std::stable_sort(records.begin(), records.end(), [](auto& a, auto& b) { return a.first < b.first; });
  uint64_t end = 0;
  for (const auto& [offset, record] : records) ReadTensor(record, &end);
}

void WeightIndex::ReadTensor(const JsonObject& json, uint64_t* end) {
  const std::string name = json.Text("name"), dtype_name = json.Text("dtype");
  const auto& params = manifest_.params;
  const auto param = std::find_if(params.begin(), params.end(), [&](const ParamInfo& p) { return p.name == name; });
  if (param == params.end()) throw json.Wrong("name", "a parameter of the manifest").Found(name);
  Tensor& tensor = tensors_[static_cast<size_t>(param - params.begin())];
  if (tensor.param) throw json.Wrong("name", "each tensor once").Found(name);
  const auto dtype =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const Dtype& d) { return dtype_name == d.name; });
  if (dtype == std::end(kDtypes) || dtype_name != param->dtype) throw json.Wrong("dtype", param->dtype).Found(dtype_name);
  if (json.Text("format") != "raw") throw json.Wrong("format", "raw");
  const auto shape = json.Ints("shape", 1, INT32_MAX);
  if (shape != param->shape || shape.size() > kMaxDimensions) throw json.Wrong("shape", "that of the manifest");
  const auto bytes = static_cast<uint64_t>(json.Int("nbytes", 1, kMaxBytes));
  uint64_t size = dtype->value.bits / 8;
  for (int64_t extent : shape) {  // below 2**46 * 2**31 in each step
    size = size > bytes ? size : size * static_cast<uint64_t>(extent);
  }
  if (size != bytes) throw json.Wrong("nbytes", "the bytes of its shape").Found(std::to_string(bytes));
  const auto offset = static_cast<uint64_t>(json.Int("byteOffset", 0, kMaxBytes));
  if (offset % kAlignment || offset < *end || offset + bytes > shards_.back().bytes) {
    throw json.Wrong("byteOffset", "a multiple of 64 inside the file, behind the tensor before");
  }
  *end = offset + bytes;
  tensor = {shards_.size() - 1, offset, dtype->value, &*param};
}

std::vector<std::string> WeightIndex::shards() const {
  std::vector<std::string> names;
  for (const Shard& shard : shards_) names.push_back(shard.name);
  return names;
}

tvm::ffi::Array<tvm::runtime::Tensor> WeightIndex::Map() const {
  std::vector<MappedFile> files;
  for (const Shard& shard : shards_) {
    files.push_back(manifest_.source.Open(shard.name));
    if (files.back().bytes() != shard.bytes) {
      throw manifest_.source.Changed(shard.name, std::to_string(shard.bytes) + " bytes",
                                     std::to_string(files.back().bytes()));
    }
  }
  tvm::ffi::Array<tvm::runtime::Tensor> mapped;
  for (const Tensor& tensor : tensors_) {
    MappedMemory memory{files[tensor.shard], tensor.offset};
    mapped.push_back(tvm::runtime::Tensor::FromNDAlloc(memory, tvm::ffi::Shape(tensor.param->shape), tensor.dtype,
                                                       DLDevice{kDLCPU, 0}));
  }
  return mapped;
}

}  // namespace mlcpipe
