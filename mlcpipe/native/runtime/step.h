// The integers of a step (tir_schedules/step_layout.py).
#ifndef MLCPIPE_RUNTIME_STEP_H_
#define MLCPIPE_RUNTIME_STEP_H_

#include <tvm/runtime/tensor.h>

#include <cstdint>
#include <vector>

#include "page.h"
#include "tensors.h"

namespace mlcpipe {

// Rows of one sequence in a step, from position `begin` on.
struct Span {
  int64_t begin, rows;
  int64_t prompt_length;               // RoPE's frequencies follow a prompt's whole length
  const std::vector<int32_t>* tables;  // the pages of each group that has a table of its own
  int32_t slot_read = kNoUnit, slot_write = kNoUnit;
  const std::vector<int32_t>* row_slots = nullptr;  // that are written after its first rows, where a draft is checked
};

class StepBuffer {
 public:
  // `tables`: of how many groups; the others have the pages of the last one.
  StepBuffer(size_t tables, bool slots) : tables_(tables), slots_(slots) {}

  // The step i32[k] of these rows, of one span or more, valid until the next call; it grows by powers of two, so that few
  // sizes differ.
  const tvm::runtime::Tensor& Fill(const Span* spans, size_t count);

 private:
  size_t tables_;
  bool slots_;
  tvm::runtime::Tensor data_ = Empty({1024}, kInt32);

  void LayOut(int64_t sequences, int64_t rows, int64_t entries, bool drafts);
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_STEP_H_
