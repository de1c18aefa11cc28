// The integers of a forward (tir_schedules/step_layout.py) over several sequences.
#ifndef MLCPIPE_RUNTIME_SERVING_BATCH_STEP_H_
#define MLCPIPE_RUNTIME_SERVING_BATCH_STEP_H_

#include "serving/scheduler.h"
#include "step.h"
#include "tensors.h"

namespace mlcpipe::serving {

// Rows of one sequence in a forward, from position `begin` on.
struct Span {
  const Sequence* sequence;
  int64_t begin, rows;
};

class BatchStep {
 public:
  // The step i32[k] of these rows, of one span or more, valid until the next call; it grows by powers of two, so that few sizes differ.
  const tvm::runtime::Tensor& Fill(const std::vector<Span>& spans) {
    int64_t rows = 0, entries = 0;
    const auto count = static_cast<int64_t>(spans.size());
    for (const Span& span : spans) {
      rows += span.rows;
      entries += static_cast<int64_t>(span.sequence->tables[0].size());
    }
    const bool has_window_table = spans[0].sequence->tables.size() == 2;
    LayOut(count, rows, entries, has_window_table);
    int32_t row = 0, entry = 0;
    for (int32_t i = 0; i < count; ++i) {
      const auto& [sequence, begin, span_rows] = spans[static_cast<size_t>(i)];
      const std::vector<int32_t>& table = sequence->tables[0];
      for (int64_t at = begin; at < begin + span_rows; ++at, ++row) {
        Part(kPosition)[row] = static_cast<int32_t>(at);
        Part(kSlot)[row] = static_cast<int32_t>(table[static_cast<size_t>(at / kPage)] * kPage + at % kPage);
        Part(kRopeLength)[row] = static_cast<int32_t>(sequence->RopeLength(at));
        Part(kSequence)[row] = i;
      }
      std::copy(table.begin(), table.end(), Part(kTable) + entry);
      if (has_window_table) {
        const std::vector<int32_t>& window = sequence->tables[1];
        std::copy(window.begin(), window.end(), Part(kWindowTable) + entry);
      }
      entry += static_cast<int32_t>(table.size());
      Part(kRowBegin)[i + 1] = row;
      Part(kTableBegin)[i + 1] = entry;
      Part(kKeys)[i] = static_cast<int32_t>(begin + span_rows);
    }
    return data_;
  }

 private:
  tvm::runtime::Tensor data_ = Empty({1024}, kInt32);

  int32_t* Part(Header name) const { return Data<int32_t>(data_) + Data<int32_t>(data_)[name]; }

  void LayOut(int64_t count, int64_t rows, int64_t entries, bool has_window_table) {
    const std::pair<Header, int64_t> parts[] = {{kPosition, rows}, {kSlot, rows},       {kRopeLength, rows},
                                                {kSequence, rows}, {kRowBegin, count + 1}, {kKeys, count},
                                                {kTableBegin, count + 1}, {kTable, entries},
                                                {kWindowTable, has_window_table ? entries : 0}};
    int64_t size = kHeader, room = data_->shape[0];
    for (const auto& [name, part] : parts) size += part;
    while (room < size) room *= 2;
    if (room > data_->shape[0]) data_ = Empty({room}, kInt32);
    auto* header = Data<int32_t>(data_);
    std::fill_n(header, kHeader, 0);
    header[kSequences] = static_cast<int32_t>(count);
    header[kRows] = static_cast<int32_t>(rows);
    int64_t at = kHeader;
    for (const auto& [name, part] : parts) {
      header[name] = static_cast<int32_t>(at);
      at += part;
    }
    if (!has_window_table) header[kWindowTable] = header[kTable];
    *Part(kRowBegin) = *Part(kTableBegin) = 0;
  }
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_BATCH_STEP_H_
