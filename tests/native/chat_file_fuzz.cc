// Changes a saved chat and reads what comes of it: as a program of its own, or with libFuzzer.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "bundle/files.h"
#include "chat_file.h"
#include "error.h"

namespace {

constexpr size_t kDigestBytes = 64;

// Whether a file opened for the model that its header had before it was changed; all that it gives is read.
bool Use(const std::string& file, const mlcpipe::ChatHeader& ours) {
  const std::vector<char> exact(file.begin(), file.end());  // so that a byte behind it is seen
  try {
    const mlcpipe::SavedChat saved({exact.data(), exact.size()}, "file", ours, {272, 64, 256});
    uint64_t sum = saved.chat.size();
    for (const char c : saved.chat) sum += static_cast<uint8_t>(c);
    for (const int32_t id : saved.tokens) {
      if (id < 0 || id >= 272) std::abort();
    }
    const uint64_t pages = (saved.tokens.size() + ours.page_tokens - 1) / ours.page_tokens;
    for (uint64_t i = 0; i < pages * ours.layers * ours.page_bytes; ++i) sum += saved.pages[i];
    return saved.tokens.size() <= 64 && sum != 1;
  } catch (const mlcpipe::Error& error) {
    if (error.code != mlcpipe::Code::kUsage) std::abort();
    return false;
  }
}

// With the hash of its content, so that what lies behind that check is reached.
void Seal(std::string* file) {
  if (file->size() < kDigestBytes) return;
  const size_t end = file->size() - kDigestBytes;
  file->replace(end, kDigestBytes, mlcpipe::Sha256({file->data(), end}));
}

}  // namespace

#ifdef MLCPIPE_FUZZ

// The header of the random llama of tests/conftest.py with a cache in float16.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mlcpipe::ChatHeader ours;
  ours.page_tokens = 16;
  ours.layers = ours.kv_heads = 2;
  ours.head_dim = 16;
  ours.page_bytes = 2048;
  std::memcpy(ours.kv_dtype, "float16", 7);
  std::string file(reinterpret_cast<const char*>(data), size);
  if (size >= sizeof ours) std::memcpy(&file[offsetof(mlcpipe::ChatHeader, model)], ours.model, sizeof ours.model);
  Seal(&file);
  Use(file, ours);
  return 0;
}

#else

// FILE COUNT SEED: prints how many changed files opened.
int main(int, char** arguments) {
  std::ifstream stream(arguments[1], std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(stream), {}};
  mlcpipe::ChatHeader ours;
  std::memcpy(&ours, whole.data(), sizeof ours);
  if (!Use(whole, ours)) return 1;
  const size_t head = sizeof ours + 4 * ours.tokens + ours.chat_bytes;  // where changes matter
  constexpr uint64_t kNumbers[] = {0, 1, 15, 16, 17, 255, 1 << 16, 0x7fffffff, 0x80000000, 0xffffffff, 1ull << 63, ~0ull};
  std::mt19937 draw(static_cast<uint32_t>(std::atoi(arguments[3])));
  int opened = 0;
  for (int i = 0; i < std::atoi(arguments[2]); ++i) {
    std::string file = whole;
    for (uint32_t change = draw() % 3 + 1; change; --change) {
      const size_t at = draw() % (draw() % 2 ? 56 : head);
      const uint64_t number = draw() % 2 ? kNumbers[draw() % std::size(kNumbers)] : draw() % 300;
      const size_t bytes = size_t{1} << draw() % 4;
      if (at + bytes <= file.size()) std::memcpy(&file[at / bytes * bytes], &number, bytes);
    }
    if (draw() % 4 == 0) file.resize(draw() % 2 ? draw() % file.size() : file.size() - 2048 + draw() % 4096);
    if (draw() % 8) Seal(&file);
    opened += Use(file, ours);
  }
  std::printf("%d\n", opened);
  return 0;
}

#endif
