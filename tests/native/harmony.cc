// What the test of answers in the harmony format calls.
#include "text/harmony.h"

#include <cstring>
#include <string>

// Pushes parts of `text`, whose lengths are given, but the last, with which it ends. Writes what each gives, and the
// byte 1. `out` has room for it.
extern "C" void harmony_text(const char* text, const int* lengths, int count, char* out) {
  mlcpipe::harmony::Text reader;
  std::string found;
  for (int i = 0; i < count; text += lengths[i++]) {
    const std::string_view part(text, static_cast<size_t>(lengths[i]));
    found += (i + 1 < count ? reader.Push(part) : reader.Flush(part)) + "\1";
  }
  std::strcpy(out, found.c_str());
}

extern "C" void harmony_without_thoughts(const char* text, char* out) {
  std::strcpy(out, mlcpipe::harmony::WithoutThoughts(text).c_str());
}
