#include "step.h"

#include <algorithm>

namespace mlcpipe {
namespace {

// Places in the header: two numbers, then where each array begins.
enum Header {
  kSequences,
  kRows,
  kPosition,
  kPlace,
  kRowBegin,
  kKeys,
  kTableBegin,
  kRopeLength,
  kSequence,
  kSlotRead = 11,
  kSlotWrite,
  kSlotOfRow,
  kTables = 16,
  kHeader = 32
};

}  // namespace

void StepBuffer::LayOut(int64_t sequences, int64_t rows, int64_t entries, bool drafts) {
  const std::pair<int, int64_t> parts[] = {
      {kPosition, rows},          {kPlace, rows},          {kRopeLength, rows},
      {kSequence, rows},          {kRowBegin, sequences + 1}, {kKeys, sequences},
      {kTableBegin, sequences + 1}, {kSlotRead, slots_ ? sequences : 0}, {kSlotWrite, slots_ ? sequences : 0},
      {kSlotOfRow, drafts ? rows : 0}};
  int64_t size = kHeader + static_cast<int64_t>(tables_) * entries, room = data_->shape[0];
  for (const auto& [name, part] : parts) size += part;
  while (room < size) room *= 2;
  if (room > data_->shape[0]) data_ = Empty({room}, kInt32);
  auto* const header = Data<int32_t>(data_);
  std::fill_n(header, kHeader, 0);
  header[kSequences] = static_cast<int32_t>(sequences);
  header[kRows] = static_cast<int32_t>(rows);
  int64_t at = kHeader;
  for (const auto& [name, part] : parts) {
    if (name == kSlotOfRow && !part) continue;  // its place says that there is none
    header[name] = static_cast<int32_t>(at);
    at += part;
  }
  for (int group = 0; kTables + group < kHeader; ++group) {
    const auto table = std::min<int64_t>(group, static_cast<int64_t>(tables_) - 1);
    header[kTables + group] = static_cast<int32_t>(at + table * entries);
  }
}

const tvm::runtime::Tensor& StepBuffer::Fill(const Span* spans, size_t count) {
  int64_t rows = 0, entries = 0;
  bool drafts = false;
  for (const Span* span = spans; span < spans + count; ++span) {
    rows += span->rows;
    entries += static_cast<int64_t>(span->tables[0].size());
    drafts = drafts || (slots_ && span->row_slots && !span->row_slots->empty());
  }
  LayOut(static_cast<int64_t>(count), rows, entries, drafts);
  auto* const data = Data<int32_t>(data_);
  const auto part = [data](int name) { return data + data[name]; };
  int32_t row = 0, entry = 0;
  *part(kRowBegin) = *part(kTableBegin) = 0;
  for (size_t i = 0; i < count; ++i) {
    const Span& span = spans[i];
    const std::vector<int32_t>& first = span.tables[0];
    for (int64_t at = span.begin; at < span.begin + span.rows; ++at, ++row) {
      part(kPosition)[row] = static_cast<int32_t>(at);
      part(kPlace)[row] = static_cast<int32_t>(first[static_cast<size_t>(at / kPage)] * kPage + at % kPage);
      part(kRopeLength)[row] = static_cast<int32_t>(std::max(at + 1, span.prompt_length));
      part(kSequence)[row] = static_cast<int32_t>(i);
    }
    for (size_t group = 0; group < tables_; ++group) {
      std::copy(span.tables[group].begin(), span.tables[group].end(), part(kTables + static_cast<int>(group)) + entry);
    }
    entry += static_cast<int32_t>(first.size());
    part(kRowBegin)[i + 1] = row;
    part(kTableBegin)[i + 1] = entry;
    part(kKeys)[i] = static_cast<int32_t>(span.begin + span.rows);
    if (!slots_) continue;
    part(kSlotRead)[i] = span.slot_read;
    part(kSlotWrite)[i] = span.slot_write;
    for (int64_t at = 0; drafts && at < span.rows; ++at) {
      const bool kept = span.row_slots && at < std::min(span.rows - 1, static_cast<int64_t>(span.row_slots->size()));
      part(kSlotOfRow)[row - span.rows + at] = kept ? (*span.row_slots)[static_cast<size_t>(at)] : kNoUnit;
    }
  }
  return data_;
}

}  // namespace mlcpipe
