// The data of a running answer, and of one that ended.
#ifndef MLCPIPE_RUNTIME_ANSWER_TYPES_H_
#define MLCPIPE_RUNTIME_ANSWER_TYPES_H_

#include <cstdint>

#include "serving/sequence.h"

namespace mlcpipe {

struct Statistics {
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0, decode_bytes = 0;
  double load_s = 0, prefill_s = 0, decode_s = 0;
  serving::CacheMiss miss;
};

enum class Finish { kStop = 1, kLength, kTimeout };

// The fate of an answer after a token.
enum class Verdict { kGoOn, kStop, kCancel };

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_ANSWER_TYPES_H_
