// Damages a tokenizer.bin and uses what still opens: as a program of its own, or with libFuzzer.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "text/text_stream.h"
#include "text/tokenizer.h"

namespace {

constexpr char kText[] =
    "Hello  I'LL <s>\xC5\xBE\xCC\x81x<a b> 123 \xE6\x97\xA5\xE6\x9C\xAC\n\n\t<|eot_id|>  end\xEA\xB0\x81 "
    "\xE1\x84\x80\xE1\x85\xA1 <0x41>\xF0\x9F\xA6\x96";

// Whether the file opened. Errors of Code::kTokenizer alone may come.
bool Use(const void* data, size_t bytes, std::string_view text) {
  try {
    mlcpipe::Tokenizer tokenizer(data, bytes);
    std::vector<uint32_t> ids = tokenizer.Encode(text, true);
    tokenizer.EncodeChat({{"<|im_start|>", false}, {text, true}, {"<|eot_id|>", false}});
    for (uint32_t id = 0; id < 400; ++id) ids.push_back(id * 7);
    tokenizer.Decode(ids);
    mlcpipe::TextStream stream(tokenizer, {{"en", "d\n"}, {3}, {1, 2}, false});
    for (uint32_t id : ids) stream.Push(id);
    stream.Flush();
    return true;
  } catch (const mlcpipe::Error& error) {
    if (error.code != mlcpipe::Code::kTokenizer) std::abort();
    return false;
  }
}

}  // namespace

#ifdef MLCPIPE_FUZZ

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint64_t> words(size / 8 + 1);
  std::memcpy(words.data(), data, size);
  Use(words.data(), size, kText);
  return 0;
}

#else

// FILE COUNT SEED: prints how many damaged files opened.
int main(int, char** arguments) {
  std::ifstream stream(arguments[1], std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(stream), {}};
  const size_t sections = static_cast<uint8_t>(file[12]);
  std::mt19937 draw(static_cast<uint32_t>(std::atoi(arguments[3])));
  int opened = 0;
  for (int i = 0; i < std::atoi(arguments[2]); ++i) {
    std::vector<uint64_t> words(file.size() / 8 + 1);
    std::memcpy(words.data(), file.data(), file.size());
    auto* bytes = reinterpret_cast<uint8_t*>(words.data());
    for (uint32_t change = draw() % 3 + 1; change; --change) {
      const uint64_t* place = words.data() + 2 + 2 * (draw() % sections);
      if (place[0] >= file.size() || place[1] == 0 || place[1] > file.size() - place[0]) continue;
      uint64_t at = place[0] + draw() % place[1];
      bytes[draw() % 20 ? at : draw() % file.size()] = static_cast<uint8_t>(draw() % 4 ? draw() : 0);
    }
    opened += Use(words.data(), file.size(), kText);
  }
  std::printf("%d\n", opened);
  return 0;
}

#endif
