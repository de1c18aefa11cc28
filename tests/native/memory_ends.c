/* BUNDLE COUNT: an engine answers while the n-th allocation fails, n from 0 to COUNT, and again with memory; prints how many
 * answers were refused. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mlcpipe.h"

enum { PROMPT = 12, TOKENS = 24 }; /* three pages */

extern void* __libc_malloc(size_t bytes);

static __thread int counts, passes;

void* malloc(size_t bytes) { return counts && passes-- == 0 ? NULL : __libc_malloc(bytes); }

typedef struct {
  int32_t code, tokens[TOKENS];
  size_t count;
} answer;

static int32_t keep(void* context, int32_t token) {
  answer* const to = context;
  to->tokens[to->count++] = token;
  return 0;
}

static void check(int holds, const char* what, int number) {
  if (holds) return;
  fprintf(stderr, "allocation %d: %s\n", number, what);
  exit(1);
}

/* Where it `fails`, allocation `number` does. */
static answer ask(mlcpipe_engine engine, int number, int fails) {
  int32_t prompt[PROMPT];
  for (int i = 0; i < PROMPT; ++i) prompt[i] = i * 37 % 250;
  mlcpipe_sampling sampling = {.size = sizeof sampling};
  mlcpipe_default_sampling(&sampling);
  sampling.temperature = 0;
  sampling.repetition_penalty = 1.1;
  answer made = {0};
  mlcpipe_request request = {.size = sizeof request, .prompt = prompt, .prompt_count = PROMPT, .max_tokens = TOKENS};
  request.sampling = &sampling;
  request.on_token = keep;
  request.context = &made;
  passes = number;
  counts = fails;
  made.code = mlcpipe_generate(engine, &request, NULL);
  counts = 0;
  return made;
}

int main(int count, char** words) {
  if (count != 3) return 1;
  mlcpipe_engine engine;
  const mlcpipe_options options = {.size = sizeof options, .threads = 1, .context_length = 256};
  check(mlcpipe_open(words[1], &options, &engine) == MLCPIPE_OK, "open", 0);
  const answer expected = ask(engine, 0, 0);
  check(expected.code == MLCPIPE_OK && expected.count == TOKENS, "an answer with memory", 0);
  int refused = 0;
  for (int number = 0; number < atoi(words[2]); ++number) {
    check(mlcpipe_reset(engine) == MLCPIPE_OK, "reset", number);
    const answer found = ask(engine, number, 1);
    check(found.code == MLCPIPE_OK || found.code == MLCPIPE_RESOURCE, "an error of another kind", number);
    check(!memcmp(found.tokens, expected.tokens, found.count * sizeof(int32_t)), "other tokens before it", number);
    refused += found.code != MLCPIPE_OK;
    const answer after = ask(engine, 0, 0);
    check(!memcmp(&after, &expected, sizeof after), "another answer after it", number);
  }
  check(mlcpipe_close(engine) == MLCPIPE_OK, "close", 0);
  printf("%d\n", refused);
  return 0;
}
