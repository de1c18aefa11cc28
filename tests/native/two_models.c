/* FOLDER_A FOLDER_B PROMPT COUNT: both models answer in turns, a token each; prints the ids of each on a line. */
#include <stdio.h>
#include <stdlib.h>

#include "mlcpipe.h"

extern const mlcpipe_symbol CODE_A[], CODE_B[];

static int32_t room[2][1000];
static size_t used[2];

static int32_t keep(void* context, int32_t token) {
  const int which = *(int*)context;
  room[which][used[which]++] = token;
  return 0;
}

static void check(int32_t code) {
  if (code == MLCPIPE_OK) return;
  mlcpipe_error error = {.size = sizeof error};
  mlcpipe_last_error(&error);
  fprintf(stderr, "%s\n", error.line);
  exit(code);
}

int main(int count, char** words) {
  if (count != 5) return 1;
  mlcpipe_engine engines[2];
  const mlcpipe_symbol* codes[2] = {CODE_A, CODE_B};
  for (int i = 0; i < 2; ++i) {
    mlcpipe_options options = {.size = sizeof options, .threads = 1, .code = codes[i]};
    check(mlcpipe_open(words[1 + i], &options, &engines[i]));
  }
  const size_t bytes = sizeof room[0] / 2;
  const int tokens = atoi(words[4]);
  for (int i = 0; i < 2; ++i) {
    const mlcpipe_text text = {words[3], __builtin_strlen(words[3])};
    check(mlcpipe_tokenize(engines[i], text, 1, room[i], bytes / sizeof(int32_t), &used[i]));
  }
  size_t begin[2] = {used[0], used[1]};
  mlcpipe_sampling sampling = {.size = sizeof sampling};
  mlcpipe_default_sampling(&sampling);
  sampling.temperature = 0;
  for (int token = 0; token < tokens; ++token) {
    for (int i = 0; i < 2; ++i) {
      mlcpipe_request request = {.size = sizeof request, .prompt = room[i], .prompt_count = used[i], .max_tokens = 1};
      request.sampling = &sampling;
      request.on_token = keep;
      request.context = &i;
      check(mlcpipe_generate(engines[i], &request, NULL));
    }
  }
  for (int i = 0; i < 2; ++i) {
    check(mlcpipe_close(engines[i]));
    for (size_t at = begin[i]; at < used[i]; ++at) printf("%d ", room[i][at]);
    printf("\n");
  }
  return 0;
}
