// OpenAI's API: what a body asks for, and the JSON of an answer, as mlcpipe/server has them.
#ifndef MLCPIPE_RUNTIME_CLI_OPENAI_H_
#define MLCPIPE_RUNTIME_CLI_OPENAI_H_

#include <string>
#include <string_view>
#include <vector>

#include "mlcpipe.h"

namespace mlcpipe::cli {

// The data that all requests share.
struct Served {
  std::vector<std::string> names;  // that clients may use; the first is the model's own, "*" is any
  std::string facts;               // for /v1/models: members of a JSON object
  mlcpipe_sampling sampling;       // where a request says nothing; a seed of 0: a new one each time
  int64_t context_length = 0, vocab_size = 0, created = 0;
  bool thinks = false;  // whether the chat template knows of reasoning
};

// A body that was checked.
struct Body {
  bool chat = false, stream = false, include_usage = false, ignore_end = false, deterministic = false;
  std::string text;                 // to continue
  std::string messages, variables;  // JSON for the chat template
  std::string without_tools;        // the variables but for the tools; "" where there are none
  std::vector<std::string> stops;
  int64_t max_tokens = 0;
  int32_t priority = 0;  // as mlcpipe_request has it: the higher goes first
  double timeout_s = 0;  // 0: none
  mlcpipe_sampling sampling;  // without the biases
  std::vector<int32_t> bias_tokens;
  std::vector<double> biases;
};

// Throw ApiError, which names the field.
Body ReadChatBody(std::string_view json, const Served& served);
Body ReadCompletionBody(std::string_view json, const Served& served);

// Throws ApiError for a model that is not served here.
void CheckModel(const std::string& name, const Served& served);

// Text of an answer.
struct Delta {
  std::string text, reasoning;
};

struct UsageCounts {
  int64_t prompt = 0, completion = 0, cached = 0, reasoning = 0;
  const char* miss = nullptr;  // as mlcpipe_statistics has it
  int64_t miss_token = -1;
};

// Writes one answer, whole or as the data of events.
class AnswerJson {
 public:
  AnswerJson(const Body& body, const Served& served);

  std::string Whole(const Delta& answer, bool stopped, const UsageCounts& usage) const;

  std::string Begin() const;  // "" for none
  std::string Piece(const Delta& delta) const;
  std::string End(bool stopped) const;
  std::string UsageAlone(const UsageCounts& usage) const;

 private:
  bool chat_;
  std::string frame_, chunk_;  // members of a whole answer, and of all events

  std::string Chunk(const std::string& choice) const;
  std::string DeltaChunk(const std::string& delta, const char* finish) const;
};

// The JSON of /v1/models, and of one model there.
std::string ModelsJson(const Served& served);
std::string ModelJson(const std::string& name, const Served& served);

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_OPENAI_H_
