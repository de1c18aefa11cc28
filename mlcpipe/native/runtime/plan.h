// The memory that a bundle takes.
#ifndef MLCPIPE_RUNTIME_PLAN_H_
#define MLCPIPE_RUNTIME_PLAN_H_

#include <cstdint>

#include "bundle/manifest.h"
#include "host.h"

namespace mlcpipe {

constexpr int64_t kFewRows = 16;  // of a forward of several answers: the logits of each take memory

// What a bundle takes and what there is, in bytes, before anything is loaded.
struct Plan {
  int64_t weights_bytes, kv_bytes, workspace_bytes, context_length;
  int64_t kv_tokens;  // of all sequences together
  FreeMemory free;

  // For so many tokens, or 0: as many of the bundle's as fit in half of the free memory. Throws kUsage for more than the
  // bundle was compiled for. Several sequences share the KV cache: it has room for the context of each, or for as many
  // tokens as fit in half of the free memory, and one context at least.
  Plan(const Manifest& manifest, int64_t context_length, int64_t sequences);

  bool Fits() const { return free.bytes - weights_bytes - workspace_bytes >= kv_bytes; }
  // Throws kResource, which says what is missing.
  void CheckFits() const;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_PLAN_H_
