// `mlcpipe.json` (mlcpipe/bundle/manifest.py): what is known of a bundle before its library is loaded.
#ifndef MLCPIPE_RUNTIME_BUNDLE_MANIFEST_H_
#define MLCPIPE_RUNTIME_BUNDLE_MANIFEST_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "files.h"
#include "json.h"
#include "states.h"

namespace mlcpipe {

// A draft head of one layer with pages of its own (`EagleInfo`): functions draft_prompt, draft_first and draft_next.
struct DraftHeadInfo {
  int64_t hidden_size, page_bytes;
  int64_t kept;  // numbers of a row that the model's forwards keep for it
};

// Lengths are in tokens.
struct ModelInfo {
  int64_t vocab_size, context_length, prefill_chunk;
  int64_t max_batch;  // rows of a decode call that the library's memory is planned for
  // Where RoPE's frequencies change and cached keys become invalid; from where on they follow the length itself.
  std::optional<int64_t> recompute_above, rope_above;
  std::string dtype, kv_dtype;
  std::optional<DraftHeadInfo> draft_head;
};

struct MemoryPlan {
  int64_t weights_bytes;
  int64_t decode_weights_bytes;         // that a decode step reads
  int64_t decode_bytes, prefill_bytes;  // workspaces of the two functions, of all the rows that they were compiled for
};

// Memory of kernels during a call, for a whole chunk of a prompt; their threads keep it.
struct ScratchInfo {
  int64_t caller_bytes, helper_bytes;  // of the thread that runs the model, and of each other one
};

struct VariantInfo {
  std::string name, kind;  // the kind is of the device, which the runtime may not know (device.h)
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

  // That a decode step reads, of a sequence of so many tokens.
  int64_t DecodeBytes(int64_t tokens) const {
    return plan.decode_weights_bytes + tokens * states.bytes_per_token() + states.slot_bytes();
  }

  // Checks sizes and hashes of the files that the runtime reads; of the weights, which are large and hold no code, the
  // sizes. Throws kBundle.
  void Verify(const std::vector<std::string>& shards) const;

  // Checks that the library was compiled with these numbers, which kernels trust; `metadata` is the library's own text.
  // Throws kBundle.
  void CheckAgrees(const std::string& metadata) const;

  const Files& source;
  std::string identity;  // SHA-256 of all but the layout that keys and values depend on: checkpoint, quantization
  std::string library;  // its path in the bundle; "" where the bundle has data only
  ModelInfo model;
  MemoryPlan plan;
  StateTable states;
  std::vector<VariantInfo> variants;  // best first
  std::vector<ParamInfo> params;      // in the order of the library's arguments
  std::vector<size_t> gathered;       // those, matrices, of which functions take the rows of their tokens alone
  std::map<std::string, FileInfo> files;

 private:
  JsonObject json_;

  void ReadTarget();
  void ReadModel();
  void ReadMemoryPlan();
  void ReadParams();
  void ReadFiles();
};

constexpr int64_t kMaxBytes = int64_t{1} << 46;  // of a file or tensor

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_BUNDLE_MANIFEST_H_
