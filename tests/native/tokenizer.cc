// What tests of the native tokenizer call.
#include "text/text_stream.h"
#include "text/tokenizer.h"

#include <cstring>
#include <string_view>

using mlcpipe::Error;
using mlcpipe::TextStream;
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

// The size of `made`, which is copied where it fits.
template <typename Array, typename Item>
int64_t Give(const Array& made, Item* out, size_t room) {
  if (made.size() <= room && !made.empty()) std::memcpy(out, made.data(), made.size() * sizeof(Item));
  return static_cast<int64_t>(made.size());
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

int64_t tokenizer_encode_chat(const void* tokenizer, const char* text, const uint32_t* sizes, const bool* contents,
                              size_t parts, uint32_t* out, size_t ids, char* line, size_t room) {
  return Guarded(line, room, [&] {
    std::vector<mlcpipe::ChatPart> chat;
    for (size_t i = 0; i < parts; text += sizes[i++]) chat.push_back({{text, sizes[i]}, contents[i]});
    return Give(static_cast<const Tokenizer*>(tokenizer)->EncodeChat(chat), out, ids);
  });
}

int64_t tokenizer_decode(const void* tokenizer, const uint32_t* ids, size_t count, bool skip_special_tokens, char* out,
                         size_t room) {
  std::string text = static_cast<const Tokenizer*>(tokenizer)->Decode({ids, ids + count}, skip_special_tokens);
  return Give(text, out, room);
}

// `stops` end with a line feed each.
int64_t stream_open(const void* tokenizer, const char* stops, size_t stop_bytes, const uint32_t* ends,
                    size_t end_count, const uint32_t* shown, size_t shown_count, bool continues, void** made,
                    char* line, size_t room) {
  return Guarded(line, room, [&] {
    mlcpipe::StreamOptions options{{}, {ends, ends + end_count}, {shown, shown + shown_count}, continues};
    std::string_view left(stops, stop_bytes);
    for (size_t end; (end = left.find('\n')) != left.npos; left.remove_prefix(end + 1)) {
      options.stops.emplace_back(left.substr(0, end));
    }
    *made = new TextStream(*static_cast<const Tokenizer*>(tokenizer), options);
    return int64_t{0};
  });
}

int64_t stream_push(void* stream, uint32_t token, char* out, size_t room) {
  return Give(static_cast<TextStream*>(stream)->Push(token), out, room);
}

int64_t stream_flush(void* stream, char* out, size_t room) {
  return Give(static_cast<TextStream*>(stream)->Flush(), out, room);
}

bool stream_stopped(const void* stream) { return static_cast<const TextStream*>(stream)->stopped(); }

int64_t stream_stop_string(const void* stream, char* out, size_t room) {
  return Give(static_cast<const TextStream*>(stream)->stop_string(), out, room);
}

void stream_close(void* stream) { delete static_cast<TextStream*>(stream); }

}  // extern "C"
