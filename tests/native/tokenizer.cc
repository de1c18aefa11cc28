// What tests of the native tokenizer call.
#include "text/tokenizer.h"

#include <cstring>
#include <memory>

using mlcpipe::Error;
using mlcpipe::Tokenizer;

namespace {

// What `call` returns; where it throws, minus the error's code, and its line.
template <typename Call>
int64_t Guarded(char* line, size_t room, Call call) {
  try {
    return call();
  } catch (const Error& error) {
    std::strncpy(line, error.what(), room - 1);
    line[room - 1] = 0;
    return -static_cast<int64_t>(error.code);
  }
}

int64_t Give(const std::vector<uint32_t>& ids, uint32_t* out, size_t room) {
  if (ids.size() <= room && !ids.empty()) std::memcpy(out, ids.data(), ids.size() * sizeof(uint32_t));
  return static_cast<int64_t>(ids.size());
}

}  // namespace

extern "C" {

int64_t tokenizer_open(const void* data, size_t bytes, void** made, char* line, size_t room) {
  return Guarded(line, room, [&] {
    *made = new Tokenizer(data, bytes);
    return int64_t{0};
  });
}

void tokenizer_close(void* tokenizer) { delete static_cast<Tokenizer*>(tokenizer); }

int64_t tokenizer_encode(const void* tokenizer, const char* text, size_t bytes, bool add_special_tokens, uint32_t* out,
                         size_t ids, char* line, size_t room) {
  return Guarded(line, room, [&] {
    return Give(static_cast<const Tokenizer*>(tokenizer)->Encode({text, bytes}, add_special_tokens), out, ids);
  });
}

}  // extern "C"
