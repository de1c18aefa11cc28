#include "plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "serving/layer_pages.h"

namespace mlcpipe {
namespace {

constexpr int64_t kMinContext = 512;
constexpr double kCompiledFewRows = 64;  // MAX_BATCH in mlcpipe/compiler/export.py
constexpr int64_t kMaxSlots = INT32_MAX;    // of tokens in the pages, which steps number
constexpr int64_t kHelperBytes = 1 << 20;  // where the manifest says nothing of a variant's scratch
constexpr double kRunBytes = 1 << 20;

int64_t Checked(int64_t sequences) {
  if (sequences >= 0 && sequences <= kMaxSequences) return sequences;
  throw Error(Code::kUsage, "sequences")
      .Expected("0 to " + std::to_string(kMaxSequences))
      .Found(std::to_string(sequences));
}

// Bytes that a run takes besides weights and KV cache: of the two forwards, as many rows as they get; their kernels'
// scratch, which threads keep; logits; and the runtime's own.
int64_t RunningBytes(const Manifest& manifest, const VariantInfo& variant, const Options& options) {
  const ModelInfo& model = manifest.model;
  const int64_t sequences = Checked(options.sequences), few_rows = sequences ? kFewRows : 1;
  const int64_t context = options.context_length > 0 ? options.context_length : model.context_length;
  const double chunk = static_cast<double>(std::min(model.prefill_chunk, context)) / static_cast<double>(model.prefill_chunk);
  const ScratchInfo scratch = variant.scratch.value_or(ScratchInfo{manifest.plan.many_bytes, kHelperBytes});
  const int threads = options.threads > 0 ? options.threads : DefaultThreads();
  double bytes = kRunBytes;
  bytes += chunk * static_cast<double>(manifest.plan.many_bytes + scratch.caller_bytes);
  bytes += static_cast<double>(few_rows) / kCompiledFewRows * static_cast<double>(manifest.plan.few_bytes);
  bytes += static_cast<double>(threads - 1) * static_cast<double>(scratch.helper_bytes);
  bytes += 4.0 * static_cast<double>(model.vocab_size) * static_cast<double>(few_rows + std::max<int64_t>(1, sequences));
  return static_cast<int64_t>(std::min(bytes, static_cast<double>(kMaxBytes)));
}

// Of the pages for so many tokens: of several answers, or of one, in which no layer gives pages back.
double KvBytes(const Manifest& manifest, int64_t context_length, int64_t kv_tokens, bool several) {
  const ModelInfo& model = manifest.model;
  std::vector<serving::PageGroup> groups{{PagesOf(kv_tokens), 0}};
  if (several) groups = serving::PageGroups(model, context_length, kv_tokens);
  const auto sliding = groups.size() > 1 ? static_cast<double>(model.sliding_layers.size()) : 0;
  const double others = static_cast<double>(model.num_layers) - sliding;
  const double pages = others * static_cast<double>(groups[0].pages);
  return (pages + sliding * static_cast<double>(groups.back().pages)) * static_cast<double>(manifest.page_bytes());
}

}  // namespace

Plan::Plan(const Manifest& manifest, const VariantInfo& variant, const Options& options, FreeMemory free_memory)
    : weights_bytes(manifest.plan.weights_bytes),
      workspace_bytes(RunningBytes(manifest, variant, options)),
      free(std::move(free_memory)) {
  const int64_t limit = manifest.model.context_length, token = manifest.plan.kv_bytes_per_token;
  const int64_t wanted = options.context_length, sequences = options.sequences;
  if (wanted < 0 || wanted > limit) {
    throw Error(Code::kUsage, "context length")
        .Expected("1 to " + std::to_string(limit) + " tokens, as compiled")
        .Found(std::to_string(wanted));
  }
  const int64_t room = std::max<int64_t>(0, free.bytes - weights_bytes - workspace_bytes);
  const int64_t fits = std::max(std::min(limit, kMinContext), room / 2 / token);
  context_length = wanted ? wanted : std::min(limit, fits);
  kv_tokens = context_length;
  if (sequences > 0) {
    const double share = static_cast<double>(room) / 2 / KvBytes(manifest, context_length, context_length, true);
    const double most = std::min(static_cast<double>(sequences), share) * static_cast<double>(context_length);
    kv_tokens = std::max(context_length, std::min(kMaxSlots, static_cast<int64_t>(most)));
    if (options.kv_tokens) kv_tokens = options.kv_tokens;
  }
  const int64_t most_kv_tokens = std::min<int64_t>(sequences * context_length, kMaxSlots);
  if (options.kv_tokens && (options.kv_tokens < context_length || options.kv_tokens > most_kv_tokens)) {
    throw Error(Code::kUsage, "kv_tokens")
        .Expected(std::to_string(context_length) + " to " + std::to_string(most_kv_tokens) +
                  ", a context for each sequence")
        .Found(std::to_string(options.kv_tokens));
  }
  const double bytes = KvBytes(manifest, context_length, kv_tokens, sequences > 0);
  kv_bytes = static_cast<int64_t>(std::min(bytes, static_cast<double>(kMaxBytes)));
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
