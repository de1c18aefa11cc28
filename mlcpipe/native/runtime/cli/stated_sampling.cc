#include "cli/stated_sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>

#include "bundle/files.h"
#include "cli/json_text.h"
#include "cli/printable.h"
#include "text/json.h"

namespace mlcpipe::cli {
namespace {

using chat::Kind;
using chat::Value;

constexpr uint64_t kMaxBytes = 16 << 20;
constexpr char kFile[] = "generation_config.json";

struct Field {
  const char* name;
  double mlcpipe_sampling::*at;
  double neutral, low, high;
};

constexpr Field kFields[] = {
    {"temperature", &mlcpipe_sampling::temperature, 1, 0, 100},
    {"top_p", &mlcpipe_sampling::top_p, 1, 1e-300, 1},
    {"min_p", &mlcpipe_sampling::min_p, 0, 0, 1},
    {"repetition_penalty", &mlcpipe_sampling::repetition_penalty, 1, 0.01, 100},
    {"presence_penalty", &mlcpipe_sampling::presence_penalty, 0, -2, 2},
    {"frequency_penalty", &mlcpipe_sampling::frequency_penalty, 0, -2, 2},
};

// `_SILENT` of stated_sampling.py, without those above.
constexpr std::string_view kSilent[] = {
    "top_k", "do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config", "use_cache", "cache_implementation", "cache_config", "max_cache_len",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "low_memory", "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size",
    "renormalize_logits", "remove_invalid_values", "length_penalty", "early_stopping", "num_beam_groups",
    "diversity_penalty", "use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type",
};
constexpr std::string_view kNeutralAtOne[] = {
    "typical_p", "num_beams", "num_return_sequences", "encoder_repetition_penalty", "guidance_scale",
};
constexpr int kMostNamed = 20;

template <size_t N>
bool Has(const std::string_view (&names)[N], std::string_view name) {
  return std::find(names, names + N, name) != names + N;
}

void LeftOut(std::string_view field) {
  const std::string name = JsonText(Printable(field.substr(0, 80)));
  std::fprintf(stderr, "note: %s: %s cannot be honoured; it is left out\n", kFile, name.c_str());
}

double NumberOf(const Value& value) {
  return value.is(Kind::kInt) || value.is(Kind::kFloat) ? value.as_number() : std::nan("");
}

// Whether a field would change an answer; `_counts` of stated_sampling.py.
bool Counts(std::string_view name, const Value& value) {
  if (value.is(Kind::kNone)) return false;
  if (name == "forced_bos_token_id" || name == "forced_eos_token_id") return true;
  if (Has(kNeutralAtOne, name)) return NumberOf(value) != 1;
  if (value.is(Kind::kBool)) return value.truth;
  if (value.is(Kind::kString)) return !value.text().empty();
  if (value.is(Kind::kList)) return value.list->span.size != 0;
  if (value.is(Kind::kDict)) return value.dict->size != 0;
  return NumberOf(value) != 0;
}

void NameOthers(const Value& config) {
  int named = 0;
  for (uint32_t i = 0; i < config.dict->size && named < kMostNamed; ++i) {
    const std::string_view name = config.dict->keys[i].text();
    const auto is_named = [&](const Field& field) { return name == field.name; };
    if (std::any_of(std::begin(kFields), std::end(kFields), is_named)) continue;
    if (Has(kSilent, name) || !Counts(name, config.dict->values[i])) continue;
    LeftOut(name);
    ++named;
  }
}

mlcpipe_sampling Stated(chat::Heap* heap, const Value& config, const mlcpipe_sampling& otherwise) {
  const auto find = [&](const char* name) -> const Value* {
    const Value* found = config.is(Kind::kDict) ? config.dict->Find(heap, heap->String(name)) : nullptr;
    return found && !found->is(Kind::kNone) ? found : nullptr;
  };
  const Value *samples = find("do_sample"), *top_k = find("top_k");
  if (samples && !samples->is(Kind::kBool)) LeftOut("do_sample");
  const bool greedy = samples && samples->is(Kind::kBool) && !samples->truth;
  bool states = greedy || top_k;
  for (const Field& field : kFields) states = states || find(field.name);
  mlcpipe_sampling made = otherwise;
  if (!states) return made;
  for (const Field& field : kFields) {
    made.*field.at = field.neutral;
    const Value* value = find(field.name);
    if (!value) continue;
    const double stated = NumberOf(*value);
    if (stated >= field.low && stated <= field.high) made.*field.at = stated;  // not for NaN
    else LeftOut(field.name);
  }
  const double most = top_k ? NumberOf(*top_k) : 0;
  const bool counts = most >= -1 && most <= INT32_MAX && most == std::floor(most);  // -1 is no limit, as 0
  made.top_k = counts && most > 0 ? static_cast<int64_t>(most) : 0;
  if (!counts) LeftOut("top_k");
  if (greedy) made.temperature = 0;
  return made;
}

}  // namespace

mlcpipe_sampling StatedSampling(const std::string& model, const mlcpipe_sampling& otherwise) {
  try {
    const auto files = Files::At(model);
    if (!files->Has(kFile)) return otherwise;
    const chat::Characters characters;
    chat::Heap heap(characters);
    const Value config = chat::ReadJson(&heap, files->Open(kFile, kMaxBytes).text(), kFile);
    if (config.is(Kind::kDict)) NameOthers(config);
    return Stated(&heap, config, otherwise);
  } catch (const Error& error) {  // as of NaN or of an integer of 80 bits, which Python reads
    std::fprintf(stderr, "note: %s; it is left out\n", error.what());
    return otherwise;
  }
}

}  // namespace mlcpipe::cli
