#include "step.h"

#include <algorithm>
#include <cstring>

#include "tensors.h"

namespace mlcpipe {
void StepBuffer::LayOut(int64_t rows) {
  data_ = Empty({kHeader + 4 * rows + 2 + 1 + 2 + pages_}, kInt32);
  auto* data = Data<int32_t>(data_);
  std::memset(data, 0, static_cast<size_t>(data_->shape[0]) * sizeof(int32_t));
  int64_t at = kHeader;
  const auto place = [&](Header name, int64_t size) {
    data[name] = static_cast<int32_t>(at);
    at += size;
    return data + data[name];
  };
  data[kSequences] = 1;
  data[kRows] = static_cast<int32_t>(rows);
  position_ = place(kPosition, rows);
  slot_ = place(kSlot, rows);
  rope_length_ = place(kRopeLength, rows);
  place(kSequence, rows);
  place(kRowBegin, 2)[1] = static_cast<int32_t>(rows);
  keys_ = place(kKeys, 1);
  place(kTableBegin, 2)[1] = static_cast<int32_t>(pages_);
  table_ = place(kTable, pages_);
  data[kWindowTable] = data[kTable];
  rows_ = rows;
}

const tvm::runtime::Tensor& StepBuffer::Fill(const Sequence& sequence, int64_t rows) {
  if (rows != rows_) LayOut(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = sequence.length + row;
    position_[row] = static_cast<int32_t>(at);
    slot_[row] = static_cast<int32_t>(sequence.pages[static_cast<size_t>(at / kPage)] * kPage + at % kPage);
    // RoPE's frequencies follow a prompt's whole length.
    rope_length_[row] = static_cast<int32_t>(std::max(at + 1, sequence.prompt_length));
  }
  *keys_ = static_cast<int32_t>(sequence.length + rows);
  std::copy(sequence.pages.begin(), sequence.pages.end(), table_);
  return data_;
}

}  // namespace mlcpipe
