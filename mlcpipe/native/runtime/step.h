// The integers of a forward (tir_schedules/step_layout.py) over the pages of one sequence, which are 0, 1, 2, ...
#ifndef MLCPIPE_RUNTIME_STEP_H_
#define MLCPIPE_RUNTIME_STEP_H_

#include <tvm/runtime/tensor.h>

#include <cstdint>

namespace mlcpipe {

class StepBuffer {
 public:
  // For so many pages.
  explicit StepBuffer(int64_t pages) : pages_(pages) {}

  // The step i32[k] of rows from a position on, valid until the next call. Tokens before `few_from` are of the prompt:
  // RoPE's frequencies follow its whole length.
  const tvm::runtime::Tensor& Fill(int64_t begin, int64_t rows, int64_t few_from);

 private:
  int64_t pages_, rows_ = 0;
  tvm::runtime::Tensor data_;
  int32_t *position_ = nullptr, *slot_ = nullptr, *rope_length_ = nullptr, *keys_ = nullptr;

  void LayOut(int64_t rows);
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_STEP_H_
