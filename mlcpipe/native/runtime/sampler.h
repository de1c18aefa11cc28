// The next token of a sequence from its logits, by the compiled sampling functions (mlcpipe/runtime/sampler.py).
#ifndef MLCPIPE_RUNTIME_SAMPLER_H_
#define MLCPIPE_RUNTIME_SAMPLER_H_

#include <tvm/ffi/function.h>
#include <tvm/runtime/tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "device.h"
#include "library.h"

namespace mlcpipe {

// As `SamplingParams` in Python, with a seed that is known.
struct Sampling {
  double temperature = 0.7, top_p = 0.95, min_p = 0.0;
  int64_t top_k = 0;
  double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;
  std::vector<std::pair<int64_t, double>> logit_bias;  // token, bias
  uint64_t seed = 0;

  bool greedy() const { return temperature == 0; }

  // Throws kUsage, which names the field and its range.
  void Check(int64_t vocab) const;
};

// How often tokens occurred, and what the logits lose for it.
class Counts {
 public:
  Counts(int64_t vocab, double presence, double frequency, double repetition);

  void Add(int32_t token);
  // Undoes the last `Add`, of this token.
  void Undo(int32_t token);
  // Changes a row of logits f32[n, V].
  void Penalize(const tvm::ffi::Function& penalize, const Device& device, const tvm::runtime::Tensor& logits, size_t row);

 private:
  std::vector<int32_t> entry_of_;                        // of each token, -1 for none
  tvm::runtime::Tensor tokens_, counts_, zeros_, row_;  // tokens_, counts_, zeros_: i32[used], with memory for `room_`
  tvm::runtime::Tensor strengths_;
  int64_t used_ = 0, room_ = 0;

  void Grow();
};

// How the tokens of one answer are drawn, and what was drawn so far. The repetition penalty counts prompt and answer (as
// transformers), presence and frequency the answer (as OpenAI).
class Row {
 public:
  Row(int64_t vocab, Sampling params, const std::vector<int32_t>& prompt);

  // Counts a token that was drawn.
  void Accept(int32_t token);

 private:
  friend class Sampler;

  Sampling params_;
  std::vector<Counts> counts_;
  tvm::runtime::Tensor bias_rows_, bias_tokens_, biases_;
};

// A row of logits, for the token at a position.
struct RowDraw {
  Row* row;  // null: anything may be drawn
  uint64_t position;
  const int32_t* draft = nullptr;  // tokens that it follows, after those that were accepted
  size_t drafted = 0;
};

// The compiled sampling functions: one call draws from all rows, each from its logits, settings and position alone.
class Sampler {
 public:
  // For at most so many rows at once.
  Sampler(const Device& device, const Library& library, int64_t vocab, int64_t rows);

  // The tokens of n rows, from logits f32[n, V], which penalties and bias change in place; -1 for NaN or infinity. Valid
  // until the next call.
  const int32_t* Draw(const tvm::runtime::Tensor& logits, const RowDraw* rows, size_t count);

 private:
  const Device& device_;
  tvm::ffi::Function sample_, penalize_, add_bias_;
  tvm::runtime::Tensor settings_[5];  // temperature, top_p, top_k, min_p, uniform: [n], of the host
  tvm::runtime::Tensor logits_, viewed_logits_;  // of the last call, and as f32[n, 1, V]
  std::vector<Reused> on_device_;     // of each
  std::vector<int32_t> drawn_;
  int64_t vocab_;

  void Put(size_t at, const RowDraw& row);
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_SAMPLER_H_
