#include "plan.h"

#include <algorithm>
#include <string>

namespace mlcpipe {
namespace {

constexpr int64_t kMinContext = 512;

// Of several answers at once, beside what one takes.
int64_t LogitsBytes(const Manifest& manifest, int64_t sequences) {
  return sequences > 0 ? 4 * manifest.model.vocab_size * (kFewRows + sequences) : 0;
}

}  // namespace

Plan::Plan(const Manifest& manifest, int64_t wanted, int64_t sequences)
    : weights_bytes(manifest.plan.weights_bytes),
      workspace_bytes(manifest.running_bytes() + LogitsBytes(manifest, sequences)),
      free(FindFreeMemory()) {
  const int64_t limit = manifest.model.context_length, token = manifest.plan.kv_bytes_per_token;
  if (wanted < 0 || wanted > limit) {
    throw Error(Code::kUsage, "context length")
        .Expected("1 to " + std::to_string(limit) + " tokens, as compiled")
        .Found(std::to_string(wanted));
  }
  const int64_t room = std::max<int64_t>(0, free.bytes - weights_bytes - workspace_bytes);
  const int64_t fits = std::max(std::min(limit, kMinContext), room / 2 / token);
  context_length = wanted ? wanted : std::min(limit, fits);
  kv_tokens = std::max(context_length, std::min(std::max<int64_t>(1, sequences) * context_length, room / 2 / token));
  kv_bytes = kv_tokens < kMaxBytes / token ? kv_tokens * token : kMaxBytes;
}

void Plan::CheckFits() const {
  if (Fits()) return;
  throw Error(Code::kResource, "not enough memory for " + std::to_string(context_length) + " tokens of context")
      .Expected(SizeWords(weights_bytes + workspace_bytes + kv_bytes) + " free: weights " + SizeWords(weights_bytes) +
                ", KV cache " + SizeWords(kv_bytes) + ", workspace " + SizeWords(workspace_bytes))
      .Found(SizeWords(free.bytes) + " free" + (free.limit.empty() ? "" : " within " + free.limit))
      .Next("use a shorter context, a smaller model or a quantization with fewer bits");
}

}  // namespace mlcpipe
