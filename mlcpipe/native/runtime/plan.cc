#include "plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace mlcpipe {
namespace {

constexpr int64_t kMinContext = 512;
constexpr int64_t kMaxKvTokens = INT32_MAX;  // whose places steps number
constexpr double kCheckpointShare = 4;    // a quarter of what the pages take may go to slots
constexpr int64_t kHelperBytes = 1 << 20;  // where the manifest says nothing of a variant's scratch
constexpr double kDraftSlots = 3;  // for the states after each token of a draft but the last
constexpr double kRunBytes = 1 << 20;

int64_t Checked(int64_t sequences) {
  if (sequences >= 0 && sequences <= kMaxSequences) return sequences;
  throw Error(Code::kUsage, "sequences")
      .Expected("0 to " + std::to_string(kMaxSequences))
      .Found(std::to_string(sequences));
}

// What the draft head of a bundle takes where it drafts: the rows that wait for it, and its logits.
double DraftHeadBytes(const ModelInfo& model) {
  const int64_t rows = kDecodeRows + model.prefill_chunk + kMaxSequences * kMaxWaitingRows;
  const int64_t numbers = model.draft_head->kept * rows +
                          kMaxSequences * (model.draft_head->hidden_size + model.vocab_size);
  return 4.0 * static_cast<double>(numbers);
}

// Pages of that head for so many tokens.
double DraftPagesBytes(const Manifest& manifest, const Options& options, int64_t tokens) {
  if (!DraftsByHead(manifest.model, options)) return 0;
  return static_cast<double>(PagesOf(tokens)) * static_cast<double>(manifest.model.draft_head->page_bytes);
}

// Bytes of a run in addition to weights and states: the workspaces of both functions for the rows they get; their kernels'
// scratch, which threads keep; logits; and the runtime's own.
int64_t RunningBytes(const Manifest& manifest, const VariantInfo& variant, const Options& options) {
  const ModelInfo& model = manifest.model;
  const int64_t sequences = Checked(options.sequences), rows = sequences ? kDecodeRows : 1;
  const int64_t context = options.context_length > 0 ? options.context_length : model.context_length;
  const double chunk = static_cast<double>(std::min(model.prefill_chunk, context)) / static_cast<double>(model.prefill_chunk);
  const ScratchInfo scratch = variant.scratch.value_or(ScratchInfo{manifest.plan.prefill_bytes, kHelperBytes});
  const int threads = options.threads > 0 ? options.threads : DefaultThreads();
  double bytes = kRunBytes;
  bytes += chunk * static_cast<double>(manifest.plan.prefill_bytes + scratch.caller_bytes);
  bytes += static_cast<double>(rows) / static_cast<double>(model.max_batch) * static_cast<double>(manifest.plan.decode_bytes);
  bytes += static_cast<double>(threads - 1) * static_cast<double>(scratch.helper_bytes);
  bytes += 4.0 * static_cast<double>(model.vocab_size) * static_cast<double>(rows + std::max<int64_t>(1, sequences));
  if (DraftsByHead(model, options)) bytes += DraftHeadBytes(model);
  return static_cast<int64_t>(std::min(bytes, static_cast<double>(kMaxBytes)));
}

// Pages for `tokens` in the first group. Groups with a window beside it have what so many sequences of the whole context need
// at once, and a window more of each, for prefixes. Slots are two for each of these sequences, which a step reads and writes, and
// as many for checkpoints as a share of the pages' memory holds.
Units UnitsFor(const Manifest& manifest, int64_t context_length, int64_t tokens, int64_t sequences) {
  const StateTable& states = manifest.states;
  Units units;
  for (const int64_t window : states.windows()) {
    const int64_t most = PagesAtOnce(window, context_length, manifest.model.prefill_chunk) + PagesOf(window);
    units.pages.push_back(units.pages.empty() ? PagesOf(tokens) : std::min(PagesOf(tokens), sequences * most));
  }
  if (!states.has_slots()) return units;
  const double share = units.Bytes(states) / kCheckpointShare / static_cast<double>(states.slot_bytes());
  const double slots = std::max(static_cast<double>(2 * sequences + 2), std::floor(share)) + kDraftSlots;
  units.slots = static_cast<int64_t>(std::min(static_cast<double>(3 * manifest.model.max_batch), slots));
  return units;
}

// Of a single conversation, with a page for a copy of a shared one.
Units OneSequence(const Manifest& manifest, int64_t context_length) {
  return UnitsFor(manifest, context_length, context_length + kPage, 1);
}

Units ManySequences(const Manifest& manifest, int64_t context_length, int64_t kv_tokens) {
  return UnitsFor(manifest, context_length, kv_tokens, (kv_tokens + context_length - 1) / context_length);
}

// The longest context of a single conversation whose states take at most so many bytes.
int64_t ContextThatFits(const Manifest& manifest, double bytes) {
  int64_t least = 0, most = manifest.model.context_length;
  while (least < most) {
    const int64_t middle = (least + most + 1) / 2;
    const bool fits = OneSequence(manifest, middle).Bytes(manifest.states) <= bytes;
    (fits ? least : most) = fits ? middle : middle - 1;
  }
  return least;
}

}  // namespace

bool DraftsByHead(const ModelInfo& model, const Options& options) {
  return options.sequences > 0 && options.draft.empty() && model.draft_head;
}

double Units::Bytes(const StateTable& states) const {
  double bytes = 0;
  for (const State& state : states.all()) {
    bytes += static_cast<double>(of(state)) * static_cast<double>(state.unit_bytes);
  }
  return bytes;
}

Plan::Plan(const Manifest& manifest, const VariantInfo& variant, const Options& options, FreeMemory free_memory)
    : weights_bytes(manifest.plan.weights_bytes),
      workspace_bytes(RunningBytes(manifest, variant, options)),
      free(std::move(free_memory)) {
  const int64_t limit = manifest.model.context_length;
  const int64_t wanted = options.context_length, sequences = options.sequences;
  if (wanted < 0 || wanted > limit) {
    throw Error(Code::kUsage, "context length")
        .Expected("1 to " + std::to_string(limit) + " tokens, as compiled")
        .Found(std::to_string(wanted));
  }
  const int64_t room = std::max<int64_t>(0, free.bytes - weights_bytes - workspace_bytes);
  const double half = static_cast<double>(room) / 2;
  context_length = wanted ? wanted : std::max(std::min(limit, kMinContext), ContextThatFits(manifest, half));
  kv_tokens = context_length;
  if (sequences > 0) {
    const double share = half / (ManySequences(manifest, context_length, context_length).Bytes(manifest.states) +
                                 DraftPagesBytes(manifest, options, context_length));
    const double most = std::min(static_cast<double>(sequences), share) * static_cast<double>(context_length);
    kv_tokens = std::max(context_length, std::min(kMaxKvTokens, static_cast<int64_t>(most)));
    if (options.kv_tokens) kv_tokens = options.kv_tokens;
  }
  const int64_t most_kv_tokens = std::min<int64_t>(sequences * context_length, kMaxKvTokens);
  if (options.kv_tokens && (options.kv_tokens < context_length || options.kv_tokens > most_kv_tokens)) {
    throw Error(Code::kUsage, "kv_tokens")
        .Expected(std::to_string(context_length) + " to " + std::to_string(most_kv_tokens) +
                  ", a context for each sequence")
        .Found(std::to_string(options.kv_tokens));
  }
  units = sequences > 0 ? ManySequences(manifest, context_length, kv_tokens) : OneSequence(manifest, context_length);
  const double bytes = units.Bytes(manifest.states) + DraftPagesBytes(manifest, options, kv_tokens);
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
