// The integers of a forward (tir_schedules/step_layout.py) over the pages of one sequence.
#ifndef MLCPIPE_RUNTIME_STEP_H_
#define MLCPIPE_RUNTIME_STEP_H_

#include <tvm/runtime/tensor.h>

#include <cstdint>

#include "sequences.h"

namespace mlcpipe {

// Places in the header: two numbers, then where each array begins.
enum Header {
  kSequences,
  kRows,
  kPosition,
  kSlot,
  kRowBegin,
  kKeys,
  kTableBegin,
  kTable,
  kRopeLength,
  kWindowTable,
  kSequence,
  kHeader = 16
};

class StepBuffer {
 public:
  // For so many pages of a sequence.
  explicit StepBuffer(int64_t pages) : pages_(pages) {}

  // The step i32[k] of the next rows of a sequence, which has pages for them; valid until the next call.
  const tvm::runtime::Tensor& Fill(const Sequence& sequence, int64_t rows);

 private:
  int64_t pages_, rows_ = 0;
  tvm::runtime::Tensor data_;
  int32_t *position_ = nullptr, *slot_ = nullptr, *rope_length_ = nullptr, *keys_ = nullptr, *table_ = nullptr;

  void LayOut(int64_t rows);
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_STEP_H_
