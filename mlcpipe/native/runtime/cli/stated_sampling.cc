#include "cli/stated_sampling.h"

#include <cmath>
#include <cstdio>

#include "bundle/files.h"
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

void LeftOut(const char* field) { std::fprintf(stderr, "note: %s: %s cannot be honoured; it is left out\n", kFile, field); }

mlcpipe_sampling Stated(chat::Heap* heap, const Value& config, const mlcpipe_sampling& otherwise) {
  const auto find = [&](const char* name) -> const Value* {
    const Value* found = config.is(Kind::kDict) ? config.dict->Find(heap, heap->String(name)) : nullptr;
    return found && !found->is(Kind::kNone) ? found : nullptr;
  };
  const Value *samples = find("do_sample"), *top_k = find("top_k");
  const bool greedy = samples && samples->is(Kind::kBool) && !samples->truth;
  bool states = greedy || top_k;
  for (const Field& field : kFields) states = states || find(field.name);
  mlcpipe_sampling made = otherwise;
  if (!states) return made;
  const auto number = [](const Value& value) {
    return value.is(Kind::kInt) || value.is(Kind::kFloat) ? value.as_number() : std::nan("");
  };
  for (const Field& field : kFields) {
    made.*field.at = field.neutral;
    const Value* value = find(field.name);
    if (!value) continue;
    const double stated = number(*value);
    if (stated >= field.low && stated <= field.high) made.*field.at = stated;  // not for NaN
    else LeftOut(field.name);
  }
  const double most = top_k ? number(*top_k) : 0;
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
    return Stated(&heap, chat::ReadJson(&heap, files->Open(kFile, kMaxBytes).text(), kFile), otherwise);
  } catch (const Error& error) {
    Fail(error.what());
  }
}

}  // namespace mlcpipe::cli
