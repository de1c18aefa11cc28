// Damages a bundle's manifest, its index of weights and a container of it, and uses what still opens.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "bundle/files.h"
#include "bundle/manifest.h"
#include "bundle/weights.h"
#include "plan.h"

namespace {

using mlcpipe::Code;
using mlcpipe::Error;

std::mt19937_64 draw;

size_t Below(size_t limit) { return limit ? draw() % limit : 0; }

// Manifest and index in memory; sanitizers see where each ends.
class Memory : public mlcpipe::Files {
 public:
  Memory(std::string manifest, std::string index)
      : Files("memory"), manifest_(std::move(manifest)), index_(std::move(index)) {}

  mlcpipe::MappedFile Open(const std::string& name, uint64_t max_bytes) const override {
    if (!Has(name)) throw Changed(name, "a file", "none");
    const std::string& text = name == "mlcpipe.json" ? manifest_ : index_;
    if (text.size() > max_bytes) throw Changed(name, "a smaller file", "a larger one");
    return {nullptr, reinterpret_cast<const uint8_t*>(text.data()), text.size()};
  }
  bool Has(const std::string& name) const override { return name == "mlcpipe.json" || name == "tensor-cache.json"; }
  bool HasCode() const override { return true; }

 private:
  std::string manifest_, index_;
};

// Replaces the JSON value of a random key, or some bytes anywhere.
std::string DamagedText(std::string text) {
  static const char* const kValues[] = {
      "0",     "-1",   "1",     "16",    "2147483647", "2147483648", "9223372036854775807", "-9223372036854775808",
      "1e308", "1e999", "0.5",  "null",  "true",       "\"\"",       "[]",                  "{}",
      "[[]]",  "[-1]",  "[0,0]", "{\"a\":{}}", "\"../x\"", "\"\\ud800\"", "\"\\u0000\"", "70368744177664", "524288"};
  for (size_t change = Below(3) + 1; change; --change) {
    const size_t at = Below(text.size());
    switch (Below(8)) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(draw());
        break;
      case 1:
        text.erase(at, Below(40));
        break;
      case 2:
        text.insert(at, text.substr(Below(text.size()), Below(60)));
        break;
      case 3:
        text.insert(at, std::string(Below(200), "[{\"("[Below(4)]));
        break;
      default: {
        const size_t colon = text.find(':', at), end = text.find_first_of(",}]\n", colon);
        if (end != std::string::npos) text.replace(colon + 1, end - colon - 1, kValues[Below(std::size(kValues))]);
      }
    }
  }
  return text;
}

template <typename Use>
bool Opens(Use use) {
  try {
    use();
    return true;
  } catch (const Error& error) {
    if (error.code != Code::kBundle && error.code != Code::kTarget) {
      std::fprintf(stderr, "%s\n", error.what());
      std::abort();
    }
    return false;
  }
}

bool UseTexts(std::string manifest_text, std::string index_text) {
  return Opens([&] {
    const Memory files(std::move(manifest_text), std::move(index_text));
    const mlcpipe::Manifest manifest(files);
    for (const mlcpipe::VariantInfo& variant : manifest.variants) {
      for (int64_t sequences : {0, 8}) {
        mlcpipe::Options options;
        options.sequences = sequences;
        const mlcpipe::Plan plan(manifest, variant, options, mlcpipe::FindFreeMemory());
        if (plan.context_length < 1 || plan.kv_bytes < 0 || plan.workspace_bytes < 0) std::abort();
      }
    }
    mlcpipe::WeightIndex(manifest).shards();
  });
}

void Store(std::string* file, size_t at, const std::string& text) {
  if (at + text.size() <= file->size()) file->replace(at, text.size(), text);
}

// Most changes are in the index and the trailer, and half of them get the hash of the changed index.
std::string DamagedContainer(std::string file, bool rehash) {
  constexpr size_t kTrailer = 96, kEnd = 900;
  for (size_t change = Below(3) + 1; change; --change) {
    const size_t at = Below(8) ? file.size() - 1 - Below(kEnd) : Below(file.size());
    file[at] = static_cast<char>(Below(3) ? draw() : draw() % 2 * 255);
  }
  uint64_t numbers[3];  // bytes, index, index_bytes
  std::memcpy(numbers, file.data() + file.size() - kTrailer + 8, sizeof numbers);
  if (rehash && numbers[0] == file.size() && numbers[1] < file.size() && numbers[2] < file.size() - numbers[1]) {
    Store(&file, file.size() - 64, mlcpipe::Sha256(std::string_view(file).substr(numbers[1], numbers[2])));
  }
  if (!Below(6)) file.resize(Below(file.size()));
  return file;
}

bool UseContainer(const std::string& file) {
  const int descriptor = memfd_create("container", 0);
  if (descriptor < 0 || write(descriptor, file.data(), file.size()) != static_cast<ssize_t>(file.size())) std::abort();
  const bool opened = Opens([&] {
    const auto files = mlcpipe::Files::In(descriptor, 0, file.size());
    uint64_t sum = 0;
    for (const char* name : {"mlcpipe.json", "tensor-cache.json", "tokenizer.bin", "params_shard_0.bin"}) {
      if (!files->Has(name)) continue;
      const mlcpipe::MappedFile opened = files->Open(name);
      for (uint64_t at = 0; at < opened.bytes(); ++at) sum += opened.data()[at];
    }
    if (sum == 1) std::abort();  // the bytes are read
    const mlcpipe::Manifest manifest(*files);
  });
  close(descriptor);
  return opened;
}

std::string Read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

// FOLDER CONTAINER COUNT SEED: prints how many damaged manifests, indexes and containers opened.
int main(int, char** arguments) {
  const std::string folder = arguments[1], container = Read(arguments[2]);
  const std::string manifest = Read(folder + "/mlcpipe.json"), index = Read(folder + "/tensor-cache.json");
  if (!UseTexts(manifest, index) || !UseContainer(container)) return 1;
  draw.seed(static_cast<uint64_t>(std::atoll(arguments[4])));
  int opened[3] = {};
  for (int i = 0; i < std::atoi(arguments[3]); ++i) {
    opened[0] += UseTexts(DamagedText(manifest), index);
    opened[1] += UseTexts(manifest, DamagedText(index));
    opened[2] += UseContainer(DamagedContainer(container, i % 2));
  }
  std::printf("%d %d %d\n", opened[0], opened[1], opened[2]);
  return 0;
}
