/* The native runtime: runs bundles that mlcpipe compiled for a CPU, Vulkan or Metal, without Python.
 *
 * Every function may be called from any thread. One call at a time uses an engine: another gets MLCPIPE_USAGE, except
 * for mlcpipe_cancel, mlcpipe_submit, mlcpipe_cancel_answer and mlcpipe_close. A function returns MLCPIPE_OK or the code
 * of an error, which mlcpipe_last_error describes. Nothing is printed, and no signal or exception leaves a call.
 *
 * Structs begin with their size, `sizeof` in the caller, so that fields can be added at the end: what a caller's struct
 * lacks has its default. */
#ifndef MLCPIPE_H_
#define MLCPIPE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MLCPIPE_API __attribute__((visibility("default")))

enum {
  MLCPIPE_OK = 0,
  MLCPIPE_USAGE = 1,      /* an argument that cannot be honoured, an engine that is closed or in use */
  MLCPIPE_CONFIG = 2,     /* of a model that is not known */
  MLCPIPE_TOKENIZER = 3,
  MLCPIPE_TEMPLATE = 4,
  MLCPIPE_BUNDLE = 5,     /* a bundle that is broken, altered or made for another ABI */
  MLCPIPE_RESOURCE = 6,   /* not enough memory */
  MLCPIPE_TARGET = 7,     /* a bundle for another machine */
  MLCPIPE_COMPUTE = 8,    /* the model computed NaN or infinity */
  MLCPIPE_CANCELLED = 9,
  MLCPIPE_INTERNAL = 10
};

/* An error: what failed and, if known, else "": where, what was expected, what was found, and the next step. */
typedef struct {
  size_t size;
  int32_t code;
  const char* line; /* all parts as one line */
  const char* what;
  const char* where;
  const char* expected;
  const char* found;
  const char* next_step;
} mlcpipe_error;

/* Of the last call of this thread that failed; `error.size` is set by the caller. Strings are valid until the next call
 * of this thread. */
MLCPIPE_API void mlcpipe_last_error(mlcpipe_error* error);

/* A symbol of a static library that mlcpipe compiled (lib/libmodel.a). Each library has a table of them under a name of
 * its own, mlcpipe_HASH_code, which ends with a name that is NULL; `mlcpipe_library_symbols` is one of them. */
typedef struct {
  const char* name;
  void* address;
} mlcpipe_symbol;

typedef struct {
  size_t size;
  const char* variant;        /* of the kernels; NULL: the best that this machine can run */
  int64_t context_length;     /* tokens of prompt and answer; 0: what the bundle allows and memory has room for */
  int32_t threads;            /* 1 to 1024; 0: the physical cores */
  const mlcpipe_symbol* code; /* a static library's table; NULL: the one that the program has, else the bundle's library.
                                 A program with several models gives that of each. */
  int64_t sequences; /* 1 to 8: answers at the same time, by mlcpipe_submit and mlcpipe_step; 0: one, by
                        mlcpipe_generate. They share the KV cache, which has room for the context of each, or for what
                        fits in half of the free memory. */
  int64_t kv_tokens; /* of `sequences`: that the KV cache has room for, at least one context; 0: as said above. Where
                        answers need more, one of them waits, and what it had is computed again. */
  const char* device; /* "cpu", "vulkan" or "metal"; NULL: what the bundle was compiled for; "auto": the bundle at
                         `gpu_path` where a GPU's driver passes its checks and answers 1.2 times as fast as the CPU, else
                         this one */
  const char* cache;  /* a folder of the app's own for what is learned of GPU drivers: compiled kernels, which checks they
                         passed; NULL: it is learned again by each process. The first engine for Vulkan decides. */
  const char* gpu_path; /* for "auto": the same model compiled for a GPU. What was measured, some 40 tokens on each, is
                           kept in `cache` for each driver; NULL: `device` takes "auto" as NULL */
  const mlcpipe_symbol* gpu_code; /* the static library's table of that bundle; NULL: its shared library */
  const char* draft; /* of `sequences`: "lookup", where tokens that an answer repeats of its texts are checked several at a
                        time, which never changes an answer, or "off"; NULL: "lookup", and the bundle's draft head where it
                        has one */
} mlcpipe_options;

/* Bytes that a bundle takes, and that can be had; the limit is "" for the machine itself. */
typedef struct {
  size_t size;
  int64_t weights_bytes; /* mapped: shared with the system's cache of files */
  int64_t kv_bytes;
  int64_t workspace_bytes; /* of kernels and logits, and the runtime's own, with a full context */
  int64_t free_bytes;
  int64_t context_length; /* that mlcpipe_open would take */
  int32_t fits;           /* 0: mlcpipe_open would give MLCPIPE_RESOURCE */
} mlcpipe_plan_info;

/* Reads the manifest of a bundle, and for a GPU what the driver says of its memory, nothing else. `path` is a folder, or
 * a file that ends with a container of data (`mlcpipe package --app weights`). `options` may be NULL here and below. */
MLCPIPE_API int32_t mlcpipe_plan(const char* path, const mlcpipe_options* options, mlcpipe_plan_info* plan);

/* An open bundle; 0 is none. */
typedef uint64_t mlcpipe_engine;

MLCPIPE_API int32_t mlcpipe_open(const char* path, const mlcpipe_options* options, mlcpipe_engine* engine);

/* Opens a container that lies in a file, such as an app's package, uncompressed and at a multiple of 64 bytes. The
 * descriptor may be closed afterwards. */
MLCPIPE_API int32_t mlcpipe_open_descriptor(int32_t descriptor, uint64_t offset, uint64_t bytes,
                                            const mlcpipe_options* options, mlcpipe_engine* engine);

/* Ends the running call, and gives back the memory when it has ended; answers that were submitted get no more
 * calls. Calls with the engine give MLCPIPE_USAGE from now on. */
MLCPIPE_API int32_t mlcpipe_close(mlcpipe_engine engine);

typedef struct {
  size_t size;
  int64_t vocab_size;
  int64_t context_length;
  const char* variant; /* valid while the engine is open, as those below */
  int32_t threads;     /* of the kernels of all engines, now */
  const char* device;  /* "cpu", "vulkan" or "metal" */
  const char* device_title; /* the GPU and its driver, "" for the CPU */
} mlcpipe_engine_info;

MLCPIPE_API int32_t mlcpipe_info(mlcpipe_engine engine, mlcpipe_engine_info* info);

/* How tokens are drawn; mlcpipe_default_sampling sets the defaults. */
typedef struct {
  size_t size;
  double temperature;        /* [0, 100]; 0 takes the most probable token */
  double top_p;              /* (0, 1] */
  double min_p;              /* [0, 1] */
  int64_t top_k;             /* >= 0; 0: no limit */
  double repetition_penalty; /* [0.01, 100], of prompt and answer */
  double presence_penalty;   /* [-2, 2], of the answer */
  double frequency_penalty;  /* [-2, 2], of the answer */
  const int32_t* bias_tokens;
  const double* biases; /* [-100, 100] */
  size_t bias_count;
  uint64_t seed; /* equal seeds draw equal tokens, as in Python */
} mlcpipe_sampling;

MLCPIPE_API void mlcpipe_default_sampling(mlcpipe_sampling* sampling);

enum { MLCPIPE_STOP = 1, MLCPIPE_LENGTH = 2, MLCPIPE_TIMEOUT = 3 };

/* Of an answer; `finish` is why it ended. */
typedef struct {
  size_t size;
  int32_t finish;
  int64_t prompt_tokens;
  int64_t cached_tokens; /* of the prompt, which the KV cache held already */
  int64_t completion_tokens;
  int64_t decode_bytes; /* of weights and KV cache that the decode steps read */
  double load_s;
  double prefill_s; /* until the first token */
  double decode_s;  /* of all later ones, without the callbacks */
  const char* cache_miss;   /* why no more was cached, a word of docs/serving.md; null: that is all that was computed */
  int64_t cache_miss_token; /* the token that is meant, from 0; -1: none */
  int64_t drafted_tokens;   /* that were checked several at a time, */
  int64_t accepted_tokens;  /* and of these, those that are in the answer */
} mlcpipe_statistics;

/* Gets each token of an answer, also the one that ended it. Another value than 0 ends the answer: MLCPIPE_CANCELLED. It
 * may call mlcpipe_cancel, mlcpipe_close and mlcpipe_set_threads. */
typedef int32_t (*mlcpipe_on_token)(void* context, int32_t token);

/* UTF-8; no 0 at its end is needed. */
typedef struct {
  const char* data;
  size_t bytes;
} mlcpipe_text;

/* Gets the text of an answer in pieces, each of whole characters. Another value than 0 ends the answer:
 * MLCPIPE_CANCELLED. It may call what mlcpipe_on_token may. */
typedef int32_t (*mlcpipe_on_text)(void* context, const char* text, size_t bytes);

/* Of `prompt`, `text` and `messages` one is given. */
typedef struct {
  size_t size;
  const int32_t* prompt; /* ids; then `stop_ids` alone end the answer */
  size_t prompt_count;
  int64_t max_tokens;      /* 0: what the context has room for */
  const int32_t* stop_ids; /* that end the answer */
  size_t stop_count;
  const mlcpipe_sampling* sampling; /* NULL: the defaults, with seed 0 */
  mlcpipe_on_token on_token;        /* may be NULL */
  void* context;
  mlcpipe_on_text on_text; /* may be NULL */
  mlcpipe_text text;       /* to continue; control tokens that it names are control tokens */
  mlcpipe_text messages;   /* JSON, a list of {"role": …, "content": …}: a chat, through the model's template */
  mlcpipe_text variables;  /* JSON, an object with more variables of the template: tools, documents, … */
  const mlcpipe_text* stops; /* texts that end the answer and are not shown */
  size_t stops_count;
  int32_t ignore_end; /* not 0: tokens that end an answer do not */
  int32_t deterministic; /* of mlcpipe_submit, not 0: takes only keys and values that were computed as this request would
                            compute them, so that the answer is that of an empty cache. Those of an earlier answer may
                            differ in bits from those of a prompt. */
  int32_t priority;  /* of mlcpipe_submit, -1, 0 or 1: the higher goes first, and may take memory from the lower, which is
                        computed again later; the tokens stay the same */
  double timeout_s;  /* of mlcpipe_submit, > 0: so long after it the answer ends with MLCPIPE_TIMEOUT; 0: never */
} mlcpipe_request;

/* Answers a prompt. Where an earlier prompt, with its answer, begins like this one, only what is new is computed: after
 * the last one to the token, after others in whole pages of 16 tokens. Those that were not used for longest are forgotten
 * when the context's memory is full. `statistics` may be NULL; it is filled
 * also when the answer was cancelled. */
MLCPIPE_API int32_t mlcpipe_generate(mlcpipe_engine engine, const mlcpipe_request* request,
                                     mlcpipe_statistics* statistics);

/* An answer of an engine with `sequences`; 0 is none. */
typedef uint64_t mlcpipe_answer;

/* Gets the end of an answer, once and last: MLCPIPE_OK with `finish` in the statistics, or the code of an error, which
 * mlcpipe_last_error describes inside the call. */
typedef void (*mlcpipe_on_end)(void* context, int32_t code, const mlcpipe_statistics* statistics);

/* Lets a request wait for mlcpipe_step, which calls its callbacks and `on_end`, all with the request's context. What the
 * request points to may go. Its tokens are those that it has alone, whatever is answered at the same time. Every thread may
 * submit at any time; an error here means that there will be no call of `on_end`. */
MLCPIPE_API int32_t mlcpipe_submit(mlcpipe_engine engine, const mlcpipe_request* request, mlcpipe_on_end on_end,
                                   mlcpipe_answer* answer);

/* Computes what is next of all answers: a token of each that has begun, and parts of prompts. `left` gets the number of
 * answers that have not ended. One thread at a time calls it, until nothing is left. */
MLCPIPE_API int32_t mlcpipe_step(mlcpipe_engine engine, size_t* left);

/* Ends an answer at the next step: `on_end` gets MLCPIPE_CANCELLED. Nothing happens where it has ended. From every thread,
 * also inside callbacks. */
MLCPIPE_API int32_t mlcpipe_cancel_answer(mlcpipe_engine engine, mlcpipe_answer answer);

/* Ends the running call, if any: it gives MLCPIPE_CANCELLED. */
MLCPIPE_API int32_t mlcpipe_cancel(mlcpipe_engine engine);

/* Logits float[count][vocab_size] after each token of a new sequence; the engine forgets all others. */
MLCPIPE_API int32_t mlcpipe_logits(mlcpipe_engine engine, const int32_t* tokens, size_t count, float* logits);

/* Token ids of a text; `add_special_tokens` not 0 adds what the tokenizer puts around a prompt. Writes at most `room` of
 * them, and their number to `count`. */
MLCPIPE_API int32_t mlcpipe_tokenize(mlcpipe_engine engine, mlcpipe_text text, int32_t add_special_tokens, int32_t* ids,
                                     size_t room, size_t* count);

/* Token ids of a chat, as a request with `messages` and `variables` has them. */
MLCPIPE_API int32_t mlcpipe_tokenize_chat(mlcpipe_engine engine, mlcpipe_text messages, mlcpipe_text variables,
                                          int32_t* ids, size_t room, size_t* count);

/* The text of tokens, without special ones. Writes at most `room` bytes, and their number to `bytes`. */
MLCPIPE_API int32_t mlcpipe_detokenize(mlcpipe_engine engine, const int32_t* ids, size_t count, char* text, size_t room,
                                       size_t* bytes);

/* The text of a chat, as the template renders it. */
MLCPIPE_API int32_t mlcpipe_render(mlcpipe_engine engine, mlcpipe_text messages, mlcpipe_text variables, char* text,
                                   size_t room, size_t* bytes);

/* Forgets all prompts and answers. */
MLCPIPE_API int32_t mlcpipe_reset(mlcpipe_engine engine);

/* Saves the last prompt and answer, with what the model keeps of them, to a file that mlcpipe_restore continues without a
 * prefill, as Python's engine does. `chat` comes back with it: JSON, an object, such as {"messages": […]}, or no bytes.
 * The file is written as a whole or not at all, in the place of a chat that was saved before; MLCPIPE_RESOURCE where the
 * disk has no room. */
MLCPIPE_API int32_t mlcpipe_save(mlcpipe_engine engine, const char* path, mlcpipe_text chat);

/* Continues a saved chat; the engine forgets all others. `on_chat`, which may be NULL, gets the JSON that was saved with it,
 * if any, in one piece; another value than 0 refuses it: MLCPIPE_CANCELLED. A file that is damaged, of another model or
 * longer than the context gives MLCPIPE_USAGE. In both cases the engine keeps what it has. */
MLCPIPE_API int32_t mlcpipe_restore(mlcpipe_engine engine, const char* path, mlcpipe_on_text on_chat, void* context);

/* Gives memory back to the system: of the KV cache what no conversation uses, after mlcpipe_reset all of it (on a GPU
 * only then), and what all engines keep for later calls. The next answer is the same, and takes it again. */
MLCPIPE_API int32_t mlcpipe_trim(mlcpipe_engine engine);

/* Threads of the kernels of all engines in this process, the caller's among them: 1 to 1024. Also between the tokens of
 * an answer. */
MLCPIPE_API int32_t mlcpipe_set_threads(int32_t threads);

/* Of the app, 0 or not: iOS ends one that uses Metal in the background. Metal has ended what it computed when this
 * returns, and what needs it, also mlcpipe_save, gives MLCPIPE_TARGET until the app is back. Without Metal nothing
 * changes. */
MLCPIPE_API int32_t mlcpipe_set_background(int32_t background);

#ifdef __cplusplus
}
#endif

#endif /* MLCPIPE_H_ */
