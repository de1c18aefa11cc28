/* DATA PROMPT: prints the model's answer as it is written; DATA is the file with its weights. */
#include <mlcpipe.h>
#include <mlcpipe_models.h>
#include <stdio.h>
#include <string.h>

static int32_t show(void* context, const char* text, size_t bytes) {
  (void)context;
  fwrite(text, 1, bytes, stdout);
  return fflush(stdout); /* another value than 0 would end the answer */
}

static int fail(void) {
  mlcpipe_error error = {.size = sizeof error};
  mlcpipe_last_error(&error);
  fprintf(stderr, "error: %s\n", error.line);
  return error.code;
}

int main(int count, char** words) {
  if (count != 3) {
    fprintf(stderr, "usage: %s DATA PROMPT\n", words[0]);
    return 1;
  }
  mlcpipe_options options = {.size = sizeof options, .code = @CODE@};
  mlcpipe_engine engine;
  if (mlcpipe_open(words[1], &options, &engine) != MLCPIPE_OK) return fail();

  char chat[4096] = "[{\"role\": \"user\", \"content\": \"";
  size_t bytes = strlen(chat);
  for (const char* c = words[2]; *c && bytes < sizeof chat - 8; ++c) {
    if (*c == '"' || *c == '\\') chat[bytes++] = '\\';
    chat[bytes++] = (unsigned char)*c < ' ' ? ' ' : *c;
  }
  bytes += (size_t)snprintf(chat + bytes, sizeof chat - bytes, "\"}]");

  mlcpipe_request request = {.size = sizeof request, .messages = {chat, bytes}, .max_tokens = 200, .on_text = show};
  mlcpipe_statistics statistics = {.size = sizeof statistics};
  const int32_t code = mlcpipe_generate(engine, &request, &statistics);
  printf("\n");
  if (code != MLCPIPE_OK) return fail();
  fprintf(stderr, "%d tokens in %.2f s\n", (int)statistics.completion_tokens, statistics.prefill_s + statistics.decode_s);
  return mlcpipe_close(engine) == MLCPIPE_OK ? 0 : fail();
}
