#include <ctime>

#include "bundle/files.h"
#include "cli/json_text.h"
#include "cli/reasoning.h"
#include "cli/serve.h"
#include "cli/stated_sampling.h"
#include "text/harmony.h"
#include "text/json.h"

namespace mlcpipe::cli {
namespace {

using chat::Heap;
using chat::Kind;
using chat::Value;

constexpr uint64_t kMaxBytes = 16 << 20, kMaxTemplateBytes = 256 << 20;
constexpr char kTemplate[] = "template.bin";

// A value of an object, or of an object in it; null where there is none of this kind.
const Value* Find(Heap* heap, const Value& object, std::initializer_list<const char*> path, Kind kind) {
  const Value* found = &object;
  for (const char* name : path) {
    found = found && found->is(Kind::kDict) ? found->dict->Find(heap, heap->String(name)) : nullptr;
  }
  return found && found->is(kind) ? found : nullptr;
}

std::string TextIn(Heap* heap, const Value& object, std::initializer_list<const char*> path) {
  const Value* found = Find(heap, object, path, Kind::kString);
  return found ? std::string(found->text()) : "";
}

std::string NameOf(const Arguments& arguments, const std::string& checkpoint) {
  if (!arguments.serve.name.empty()) return arguments.serve.name;
  if (!checkpoint.empty()) return checkpoint;
  const size_t end = arguments.model.find_last_not_of('/');
  const std::string path = arguments.model.substr(0, end + 1);
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

Served ServedBundle(const Arguments& arguments, mlcpipe_engine engine) {
  Served served;
  auto info = Sized<mlcpipe_engine_info>();
  Check(mlcpipe_info(engine, &info));
  served.context_length = info.context_length;
  served.vocab_size = info.vocab_size;
  served.created = std::time(nullptr);
  served.sampling = Sized<mlcpipe_sampling>();
  mlcpipe_default_sampling(&served.sampling);
  served.sampling.temperature = served.sampling.top_p = 1;
  served.sampling = StatedSampling(arguments.model, served.sampling);
  try {
    const auto files = Files::At(arguments.model);
    const chat::Characters characters;
    Heap heap(characters);
    const Value manifest = chat::ReadJson(&heap, files->Open("mlcpipe.json", kMaxBytes).text(), "mlcpipe.json");
    served.names = {NameOf(arguments, TextIn(&heap, manifest, {"name"}))};
    served.facts = ",\"model_type\":" + JsonText(TextIn(&heap, manifest, {"model", "model_type"})) +
                   ",\"quantization\":" + JsonText(TextIn(&heap, manifest, {"quantization"})) +
                   ",\"target\":" + JsonText(TextIn(&heap, manifest, {"target", "name"})) + ",\"device\":\"CPU\"";
    if (files->Has(kTemplate)) {
      const auto file = files->Open(kTemplate, kMaxTemplateBytes);
      const auto mentions = [&](std::string_view text) { return file.text().find(text) != std::string_view::npos; };
      served.thinks = mentions(ReasoningSplitter::kEnd) || mentions(harmony::kChannel);
    }
  } catch (const Error& error) {
    Fail(error.what());
  }
  if (arguments.temperature >= 0) served.sampling.temperature = arguments.temperature;
  if (arguments.top_p >= 0) served.sampling.top_p = arguments.top_p;
  served.names.insert(served.names.end(), arguments.serve.aliases.begin(), arguments.serve.aliases.end());
  return served;
}

}  // namespace mlcpipe::cli
