// `mlcpipe.json` (mlcpipe/bundle/manifest.py): what is known of a bundle before its library is loaded.
#ifndef MLCPIPE_RUNTIME_BUNDLE_MANIFEST_H_
#define MLCPIPE_RUNTIME_BUNDLE_MANIFEST_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "files.h"
#include "json.h"

namespace mlcpipe {

// Lengths are in tokens.
struct ModelInfo {
  int64_t vocab_size, hidden_size, num_layers, num_attention_heads, num_key_value_heads, head_dim;
  int64_t context_length, prefill_chunk;
  // Where RoPE's frequencies change and cached keys become invalid; from where on they follow the length itself.
  std::optional<int64_t> recompute_above, rope_above;
  std::string dtype, kv_dtype;
  std::optional<int64_t> sliding_window;  // tokens that a query sees in the layers that slide
  std::set<int64_t> sliding_layers;
};

struct MemoryPlan {
  int64_t weights_bytes, kv_bytes_per_token;
  int64_t decode_weights_bytes;          // that a decode step reads
  int64_t few_bytes, many_bytes;         // workspaces of the two forwards, of all the rows that they were compiled for
};

// What kernels take for the time of a call, for a whole chunk of a prompt; their threads keep it.
struct ScratchInfo {
  int64_t caller_bytes, helper_bytes;  // of the thread that runs the model, and of each other one
};

// Devices that kernels may be compiled for.
constexpr char kKinds[] = "cpu, vulkan, metal";
inline bool IsKind(std::string_view kind) { return kind == "cpu" || kind == "vulkan" || kind == "metal"; }

struct VariantInfo {
  std::string name, kind;  // the kind is of the device: IsKind
  std::vector<std::string> features;
  std::optional<ScratchInfo> scratch;
};

struct ParamInfo {
  std::string name, dtype;
  std::vector<int64_t> shape;
};

struct FileInfo {
  std::string sha256;
  uint64_t bytes;
};

class Manifest {
 public:
  // Reads and checks all that the runtime uses, trusting nothing. Throws kBundle, and kTarget for a bundle that was
  // made for another kind of machine. `files` stay as long as this.
  explicit Manifest(const Files& files);

  // Keys and values that a layer has in a page.
  int64_t page_bytes() const;

  // Checks sizes and hashes of the files that the runtime reads; of the weights, which are large and hold no code, the
  // sizes. Throws kBundle.
  void Verify(const std::vector<std::string>& shards) const;

  // Checks that the library was compiled with these numbers, which kernels trust; `metadata` is the library's own text.
  // Throws kBundle.
  void CheckAgrees(const std::string& metadata) const;

  const Files& source;
  std::string identity;  // SHA-256 of what keys and values depend on besides their layout: checkpoint, quantization
  std::string library;  // its path in the bundle; "" where the bundle has data only
  ModelInfo model;
  MemoryPlan plan;
  std::vector<VariantInfo> variants;  // best first
  std::vector<ParamInfo> params;      // in the order of the library's arguments
  std::map<std::string, FileInfo> files;

 private:
  JsonObject json_;

  void ReadModel();
  void ReadTarget();
  void ReadParams();
  void ReadFiles();
};

constexpr int64_t kMaxBytes = int64_t{1} << 46;  // of a file or tensor

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_BUNDLE_MANIFEST_H_
