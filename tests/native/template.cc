// What tests of the native runtime's chat templates call.
#include "text/template.h"

#include <cstring>

namespace {

// Names and texts by turns, up to a null.
std::vector<std::pair<std::string, std::string>> Tokens(const char* const* tokens) {
  std::vector<std::pair<std::string, std::string>> made;
  for (; *tokens; tokens += 2) made.emplace_back(tokens[0], tokens[1]);
  return made;
}

}  // namespace

// The names of all nodes, a line each: OPS of template_nodes.py.
extern "C" const char* template_ops() {
  return ""
#define MLCPIPE_LINE(name, what, operands) #name "\n"
      MLCPIPE_TEMPLATE_OPS(MLCPIPE_LINE)
#undef MLCPIPE_LINE
      ;
}

// Renders to `out` (`room` bytes); `*length` is then the text's. With `marked`, parts that messages wrote lie between
// the bytes 1 and 2. Returns 0, or the error's code with its line in `out`.
extern "C" int template_render(const void* program, size_t bytes, const char* messages, size_t messages_bytes,
                               const char* extras, size_t extras_bytes, const char* const* tokens, int prompt,
                               const int* now, int marked, char* out, size_t room, size_t* length) {
  std::string text;
  int failed = 0;
  try {
    mlcpipe::chat::Template made(program, bytes);
    mlcpipe::chat::Request request;
    request.messages = {messages, messages_bytes};
    request.extras = {extras, extras_bytes};
    request.tokens = Tokens(tokens);
    request.add_generation_prompt = prompt != 0;
    int* fields[] = {&request.now.tm_year, &request.now.tm_mon, &request.now.tm_mday, &request.now.tm_hour,
                     &request.now.tm_min,  &request.now.tm_sec, &request.now.tm_wday, &request.now.tm_yday};
    for (int i = 0; i < 8; ++i) *fields[i] = now[i];
    if (!marked) text = made.Render(request);
    for (const mlcpipe::chat::Part& part : marked ? made.RenderMarked(request) : std::vector<mlcpipe::chat::Part>()) {
      text += part.is_content ? "\1" + part.text + "\2" : part.text;
    }
  } catch (const mlcpipe::Error& error) {
    failed = static_cast<int>(error.code);
    text = error.what();
  }
  *length = text.size();
  std::memcpy(out, text.data(), text.size() < room ? text.size() : room);
  return failed;
}
