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

// As in test_chat_damage.py.
mlcpipe::StateTable Table() {
  return mlcpipe::StateTable({
      {"0", "int8", true, 0, 2, {{"keys", "float16", {8, 16}, 1, 256}, {"values", "float16", {16, 8}, 0, 256}}, 1, 1024},
      {"1", "int8", true, 20, 1, {{"keys", "int8", {4, 16, 2}, 1, 128}, {"scales", "float16", {1, 16}, 1, 32}}, 1, 160},
      {"2", "float32", false, 0, 1, {{"rows", "float32", {2, 9}, mlcpipe::kNoUnit, 72}}, 4, 72},
  });
}

mlcpipe::ChatHeader Ours() {
  mlcpipe::ChatHeader ours;
  Table().Hash().copy(ours.states, sizeof ours.states);
  std::memcpy(ours.kv_dtype, "float16", 7);
  return ours;
}

// Whether a file opened; all that it gives is read.
bool Use(const std::string& file) {
  const std::vector<char> exact(file.begin(), file.end());  // so that a byte behind it is seen
  const mlcpipe::StateTable table = Table();
  try {
    const mlcpipe::SavedChat saved({exact.data(), exact.size()}, "file", Ours(), table, {272, 64, 256});
    uint64_t sum = saved.chat.size();
    for (const char c : saved.chat) sum += static_cast<uint8_t>(c);
    for (const int32_t id : saved.tokens) {
      if (id < 0 || id >= 272) std::abort();
    }
    const auto bytes = table.BytesAfter(static_cast<int64_t>(saved.tokens.size()));
    for (int64_t i = 0; i < bytes; ++i) sum += saved.states[i];
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

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const mlcpipe::ChatHeader ours = Ours();
  std::string file(reinterpret_cast<const char*>(data), size);
  if (size >= sizeof ours) file.replace(offsetof(mlcpipe::ChatHeader, model), 128, ours.model, 128);  // and the states
  Seal(&file);
  Use(file);
  return 0;
}

#else

// FILE COUNT SEED: prints how many changed files opened.
int main(int, char** arguments) {
  std::ifstream stream(arguments[1], std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(stream), {}};
  mlcpipe::ChatHeader header;
  std::memcpy(&header, whole.data(), sizeof header);
  if (!Use(whole)) return 1;
  const size_t head = sizeof header + 4 * header.tokens + header.chat_bytes;  // where changes matter
  constexpr uint64_t kNumbers[] = {0, 1, 15, 16, 17, 255, 1 << 16, 0x7fffffff, 0x80000000, 0xffffffff, 1ull << 63, ~0ull};
  std::mt19937 draw(static_cast<uint32_t>(std::atoi(arguments[3])));
  int opened = 0;
  for (int i = 0; i < std::atoi(arguments[2]); ++i) {
    std::string file = whole;
    for (uint32_t change = draw() % 3 + 1; change; --change) {
      const size_t at = draw() % (draw() % 2 ? offsetof(mlcpipe::ChatHeader, model) : head);
      const uint64_t number = draw() % 2 ? kNumbers[draw() % std::size(kNumbers)] : draw() % 300;
      const size_t bytes = size_t{1} << draw() % 4;
      if (at + bytes <= file.size()) std::memcpy(&file[at / bytes * bytes], &number, bytes);
    }
    if (draw() % 4 == 0) file.resize(draw() % 2 ? draw() % file.size() : file.size() - 1024 + draw() % 2048);
    if (draw() % 8) Seal(&file);
    opened += Use(file);
  }
  std::printf("%d\n", opened);
  return 0;
}

#endif
