// What the test of the server's reasoning calls.
#include "cli/reasoning.h"

#include <cstring>

// Pushes parts of `text`, whose lengths are given, and finishes. Writes what each gives: reasoning, the byte 1, text,
// the byte 2. `out` has room for it.
extern "C" void reasoning_split(int open, const char* text, const int* lengths, int count, char* out) {
  using mlcpipe::cli::Delta;
  using mlcpipe::cli::ReasoningSplitter;
  ReasoningSplitter splitter(open ? ReasoningSplitter::kInside : ReasoningSplitter::kBefore);
  std::string found;
  const auto add = [&](const Delta& delta) { found += delta.reasoning + "\1" + delta.text + "\2"; };
  for (int i = 0; i < count; text += lengths[i++]) add(splitter.Push({text, static_cast<size_t>(lengths[i])}));
  add(splitter.Finish());
  std::strcpy(out, found.c_str());
}
