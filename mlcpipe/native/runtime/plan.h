// The memory that a bundle takes (mlcpipe/bundle/memory.py).
#ifndef MLCPIPE_RUNTIME_PLAN_H_
#define MLCPIPE_RUNTIME_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "host.h"
#include "mlcpipe.h"

namespace mlcpipe {

constexpr int64_t kMaxSequences = 8;
constexpr int64_t kMaxWaitingRows = 128;  // that the draft head has not seen of an answer, after which it starts over
constexpr int64_t kDecodeRows = 16;  // of a decode of several answers: the logits of each take memory

// How an engine is opened.
struct Options {
  std::string variant;         // "": the best that this machine can run
  int64_t context_length = 0;  // 0: what fits
  int threads = 0;             // 0: the physical cores
  int64_t sequences = 0;       // 1 to kMaxSequences: so many answers at once; 0: one at a time, by `Generate`
  int64_t kv_tokens = 0;       // of several sequences together; 0: what fits
  const mlcpipe_symbol* code = nullptr;  // of a static library; null: the program's, else the bundle's
  std::string device;                    // a kind; "" or "auto": that of the bundle
  std::string cache;                     // a folder for what is learned of drivers; "": none
  std::string gpu_path;                  // of the same model for a GPU, for "auto": see `OpenFaster`
  const mlcpipe_symbol* gpu_code = nullptr;
  std::string draft;  // of several sequences: "" for all that the bundle has, "lookup", or "off"
};

// Whether the draft head of a bundle drafts.
bool DraftsByHead(const ModelInfo& model, const Options& options);

// How many pages each group has, and how many slots there are.
struct Units {
  std::vector<int64_t> pages;
  int64_t slots = 0;

  int64_t of(const State& state) const { return state.paged ? pages[state.group] : slots; }
  double Bytes(const StateTable& states) const;
};

// Memory that a bundle needs and memory that is there, in bytes, before anything is loaded.
struct Plan {
  int64_t weights_bytes, kv_bytes, workspace_bytes, context_length;
  int64_t kv_tokens;  // of all sequences together
  Units units;
  FreeMemory free;  // of the device

  // A context of 0: as many tokens of the bundle's as fit in half of the free memory. Throws kUsage for more than the
  // bundle was compiled for. Several sequences share the KV cache: it has room for `kv_tokens`, from one context to that of
  // each; for 0, for as many as fit in half of the free memory.
  Plan(const Manifest& manifest, const VariantInfo& variant, const Options& options, FreeMemory free_memory);

  bool Fits() const { return free.bytes - weights_bytes - workspace_bytes >= kv_bytes; }
  // Throws kResource, which says what is missing.
  void CheckFits() const;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_PLAN_H_
