// Renders changed programs and messages: for libFuzzer, or with MLCPIPE_MAIN as a program that changes files itself.
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "text/template.h"

// A file: the length of a program as u32, the program, messages as JSON.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint32_t bytes = 0;
  if (size < sizeof bytes) return 0;
  std::memcpy(&bytes, data, sizeof bytes);
  if (bytes > size - sizeof bytes) return 0;
  std::vector<uint64_t> program(bytes / 8 + 1);  // at a multiple of 8
  std::memcpy(program.data(), data + sizeof bytes, bytes);
  const char* rest = reinterpret_cast<const char*>(data) + sizeof bytes + bytes;
  mlcpipe::chat::Request request;
  request.messages = {rest, size - sizeof bytes - bytes};
  request.extras = R"({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5]}}}]})";
  request.tokens = {{"bos_token", "<s>"}};
  try {
    mlcpipe::chat::Template made(program.data(), bytes);
    made.Render(request);
    made.RenderMarked(request);
    return 0;
  } catch (const mlcpipe::Error& error) {
    return error.what()[0] == 0;  // each error has a line
  }
}

#ifdef MLCPIPE_MAIN

namespace {

// One to four changes: of a byte, of a number of 32 bits that is then a small one, or to a copy of another place.
void Change(std::mt19937* draw, std::string* file) {
  for (uint32_t left = 1 + (*draw)() % 4; left > 0; --left) {
    size_t at = 4 + (*draw)() % (file->size() - 4);
    uint32_t kind = (*draw)() % 4, number = (*draw)() % ((*draw)() % 2 ? 64 : 4096);
    if (kind == 0) (*file)[at] = static_cast<char>((*draw)());
    if (kind == 1) (*file)[at] ^= static_cast<char>(1 << ((*draw)() % 8));
    size_t word = at / 4 * 4, other = ((*draw)() % (file->size() - 4)) / 4 * 4;
    if (word + 4 > file->size() || word < 4 || other < 4) continue;
    if (kind == 2) std::memcpy(&(*file)[word], &number, 4);
    if (kind == 3) std::memcpy(&(*file)[word], &(*file)[other], 4);
  }
}

}  // namespace

// COUNT SEED FILE...: each file as it is and with COUNT changes.
int main(int, char** arguments) {
  std::mt19937 draw(static_cast<uint32_t>(std::stoul(arguments[2])));
  for (char** path = arguments + 3; *path; ++path) {
    std::ifstream stream(*path, std::ios::binary);
    std::string whole((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    for (unsigned long left = std::stoul(arguments[1]) + 1; left > 0; --left) {
      std::string file = whole;
      if (left > 1) Change(&draw, &file);
      if (LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(file.data()), file.size()) != 0) return 1;
    }
  }
  return 0;
}

#endif
