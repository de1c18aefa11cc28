// Arguments of the C API as the runtime's own.
#ifndef MLCPIPE_RUNTIME_C_STRUCTS_H_
#define MLCPIPE_RUNTIME_C_STRUCTS_H_

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "engine.h"
#include "mlcpipe.h"

namespace mlcpipe {

// A caller's struct, which may be shorter or longer than ours: what it lacks is as in `defaults`.
template <typename Struct>
Struct Taken(const Struct* given, Struct defaults) {
  if (!given) return defaults;
  if (given->size < sizeof given->size) throw Error(Code::kUsage, "a struct has no size");
  std::memcpy(&defaults, given, std::min(given->size, sizeof defaults));
  return defaults;
}

// Fills as much of a caller's struct as it has.
template <typename Struct>
void Give(Struct values, Struct* result) {
  if (!result || result->size < sizeof result->size) throw Error(Code::kUsage, "a struct has no size");
  values.size = result->size;
  std::memcpy(result, &values, std::min(result->size, sizeof values));
}

template <typename T>
T* Required(T* pointer, const char* name) {
  if (!pointer) throw Error(Code::kUsage, name).Expected("an address").Found("NULL");
  return pointer;
}

inline std::vector<int32_t> Ids(const int32_t* ids, size_t count, const char* name) {
  if (!count) return {};
  Required(ids, name);
  return {ids, ids + count};
}

inline Engine::Options OptionsOf(const mlcpipe_options* given) {
  const mlcpipe_options options =
      Taken(given, {sizeof options, nullptr, 0, 0, nullptr, 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr});
  const auto text = [](const char* given) { return std::string(given ? given : ""); };
  return {text(options.variant), options.context_length, options.threads,      options.sequences,
          options.kv_tokens,     options.code,           text(options.device), text(options.cache),
          text(options.gpu_path), options.gpu_code, text(options.draft)};
}

inline Sampling SamplingOf(const mlcpipe_sampling* given) {
  mlcpipe_sampling defaults{};
  defaults.size = sizeof defaults;
  mlcpipe_default_sampling(&defaults);
  const mlcpipe_sampling taken = Taken(given, defaults);
  Sampling sampling;
  sampling.temperature = taken.temperature;
  sampling.top_p = taken.top_p;
  sampling.min_p = taken.min_p;
  sampling.top_k = taken.top_k;
  sampling.repetition_penalty = taken.repetition_penalty;
  sampling.presence_penalty = taken.presence_penalty;
  sampling.frequency_penalty = taken.frequency_penalty;
  sampling.seed = taken.seed;
  for (size_t i = 0; i < taken.bias_count; ++i) {
    sampling.logit_bias.emplace_back(Required(taken.bias_tokens, "bias_tokens")[i], Required(taken.biases, "biases")[i]);
  }
  return sampling;
}

inline std::string_view ViewOf(mlcpipe_text text) {
  if (!text.bytes) return {};
  return {Required(text.data, "text"), text.bytes};
}

// Writes as many elements as there is room for, and how many there are.
template <typename Elements, typename Element>
void GiveAll(const Elements& elements, Element* to, size_t room, size_t* count) {
  *Required(count, "count") = elements.size();
  if (room) std::copy_n(elements.begin(), std::min(room, elements.size()), Required(to, "room"));
}

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_C_STRUCTS_H_
