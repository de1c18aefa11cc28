#include "tokenizer_merges.h"

#include <algorithm>

#include "utf8.h"

namespace mlcpipe {

void Merger::Add(uint32_t id, uint32_t bytes) {
  auto count = static_cast<int32_t>(symbols_.size());
  symbols_.push_back({id, bytes, count - 1, count + 1});
}

// One token a byte or character; others fall back on bytes, or are unknown.
void Merger::Begin(std::string_view word) {
  symbols_.clear();
  if (tables_.settings.byte_level) {
    for (char c : word) {
      uint32_t id = tables_.bytes[static_cast<uint8_t>(c)];
      if (id == kNone) id = tables_.settings.unknown;
      if (id != kNone) Add(id, 1);
    }
    return;
  }
  uint32_t unknown = 0;  // bytes of the unknown token that is not added yet
  for (size_t at = 0; at < word.size();) {
    size_t begin = at;
    uint32_t id = tables_.FindChar(utf8::Next(word, &at));
    auto bytes = static_cast<uint32_t>(at - begin);
    std::string_view text = word.substr(begin, bytes);
    if (id != kNone) {
      if (unknown) Add(tables_.settings.unknown, unknown);
      unknown = 0;
      Add(id, bytes);
    } else if (tables_.settings.byte_fallback && std::all_of(text.begin(), text.end(), [&](char c) {
                 return tables_.bytes[static_cast<uint8_t>(c)] != kNone;
               })) {
      // Before an unknown one that is not added yet, as `tokenizers` does.
      for (char c : text) Add(tables_.bytes[static_cast<uint8_t>(c)], 1);
    } else if (tables_.settings.unknown != kNone) {
      if (unknown && !tables_.settings.fuses_unknown) {
        Add(tables_.settings.unknown, unknown);
        unknown = 0;
      }
      unknown += bytes;
    }
  }
  if (unknown) Add(tables_.settings.unknown, unknown);
}

// Notes the merge of a symbol with the one after it.
void Merger::Consider(int32_t place) {
  const Symbol& left = symbols_[place];
  const MergeSlot* slot = tables_.FindMerge(left.id, symbols_[left.after].id);
  if (slot) heap_.push_back({uint64_t{slot->rank} << 32 | static_cast<uint32_t>(place), slot->merged});
}

const std::vector<Merger::Symbol>& Merger::Encode(std::string_view word) {
  uint32_t whole = tables_.FindWord(word);
  if (whole != kNone) {
    symbols_.assign(1, {whole, static_cast<uint32_t>(word.size()), -1, 1});
    return symbols_;
  }
  Begin(word);
  heap_.clear();
  auto count = static_cast<int32_t>(symbols_.size());
  for (int32_t place = 0; place + 1 < count; ++place) Consider(place);
  std::make_heap(heap_.begin(), heap_.end());
  while (!heap_.empty()) {
    Merge best = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end());
    heap_.pop_back();
    auto place = static_cast<int32_t>(best.order & 0xFFFFFFFF);
    Symbol& left = symbols_[place];
    if (left.bytes == 0 || left.after >= count) continue;
    Symbol& right = symbols_[left.after];
    const MergeSlot* slot = tables_.FindMerge(left.id, right.id);
    if (!slot || slot->merged != best.merged) continue;  // one of them has been merged since
    left.id = best.merged;
    left.bytes += right.bytes;
    right.bytes = 0;
    left.after = right.after;
    if (left.after < count) symbols_[left.after].before = place;
    size_t noted = heap_.size();
    if (left.before >= 0) Consider(left.before);
    if (heap_.size() > noted) std::push_heap(heap_.begin(), heap_.end());
    noted = heap_.size();
    if (left.after < count) Consider(place);
    if (heap_.size() > noted) std::push_heap(heap_.begin(), heap_.end());
  }
  symbols_.erase(std::remove_if(symbols_.begin(), symbols_.end(), [](const Symbol& one) { return one.bytes == 0; }),
                 symbols_.end());
  return symbols_;
}

}  // namespace mlcpipe
