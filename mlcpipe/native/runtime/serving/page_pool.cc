#include "serving/page_pool.h"

#include <utility>

namespace mlcpipe::serving {

PagePool::PagePool(std::vector<PageGroup> of, int64_t slots) : groups(std::move(of)) {
  for (const PageGroup& group : groups) units.emplace_back(group.pages);
  if (slots) units.emplace_back(slots);
}

bool PagePool::Reserve(Sequence* sequence, int64_t rows) {
  for (size_t kind = 0; kind < units.size(); ++kind) {
    if (MissingOf(kind, *sequence, rows) > 0) return false;
  }
  if (has_slots() && sequence->next_slot == kNoUnit) {
    sequence->next_slot = HasNextSlot(*sequence) ? sequence->slot : units.back().New();
  }
  for (size_t group = 0; group < groups.size(); ++group) {
    auto& table = sequence->tables[group];
    if (SharesEnd(group, *sequence)) {
      int32_t& end = table[static_cast<size_t>(sequence->computed / kPage)];
      const int32_t source = end;
      end = units[group].New();
      copies_.push_back({source, end, group});  // which keeps the use of the source
    }
    while (static_cast<int64_t>(table.size()) < PagesOf(sequence->computed + rows)) table.push_back(units[group].New());
  }
  return true;
}

void PagePool::Advance(Sequence* sequence, int64_t rows) {
  sequence->computed += rows;
  if (sequence->next_slot == kNoUnit) return;
  const int32_t before = std::exchange(sequence->slot, std::exchange(sequence->next_slot, kNoUnit));
  if (before != kNoUnit && before != sequence->slot) Drop(groups.size(), before);
}

void PagePool::Repeat(Sequence* sequence) {
  const int32_t next = std::exchange(sequence->next_slot, kNoUnit);
  if (next != kNoUnit && next != sequence->slot) Drop(groups.size(), next);
}

std::vector<int64_t> PagePool::Missing(const Sequence& sequence, int64_t rows) const {
  std::vector<int64_t> missing;
  for (size_t kind = 0; kind < units.size(); ++kind) missing.push_back(MissingOf(kind, sequence, rows));
  return missing;
}

int64_t PagePool::MissingOf(size_t kind, const Sequence& sequence, int64_t rows) const {
  if (kind == groups.size()) return !HasNextSlot(sequence) - units[kind].free();
  const int64_t has = static_cast<int64_t>(sequence.tables[kind].size());
  const int64_t wanted = std::max<int64_t>(0, PagesOf(sequence.computed + rows) - has);
  return wanted + SharesEnd(kind, sequence) - units[kind].free();
}

// Whether the next step has a slot to write, if need be the one that it reads.
bool PagePool::HasNextSlot(const Sequence& sequence) const {
  if (sequence.next_slot != kNoUnit || sequence.slot == kNoUnit) return sequence.next_slot != kNoUnit;
  return units.back().uses(sequence.slot) == 1 && !units.back().held(sequence.slot) && !sequence.request.redraws;
}

// Whether the page that the next token goes to has tokens already, and is not this sequence's alone.
bool PagePool::SharesEnd(size_t group, const Sequence& sequence) const {
  if (sequence.computed % kPage == 0) return false;
  const int32_t page = sequence.tables[group][static_cast<size_t>(sequence.computed / kPage)];
  // A copy that is to be made of it is made before anything is written to it.
  const auto copies = std::count_if(copies_.begin(), copies_.end(), [&](const PageCopy& copy) {
    return copy.source == page && copy.group == group;
  });
  return units[group].uses(page) - copies > 1 || units[group].held(page);
}

std::vector<PageCopy> PagePool::TakeCopies() {
  const std::vector<PageCopy> copies = std::move(copies_);
  copies_.clear();
  for (const PageCopy& copy : copies) Drop(copy.group, copy.source);
  return copies;
}

void PagePool::Fork(const Sequence& parent, Sequence* child) {
  const int64_t count = PagesOf(parent.computed);
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& table = parent.tables[group];
    child->tables[group].assign(table.begin(), table.begin() + count);
    child->kept_from[group] = parent.kept_from[group];
    for (int64_t at = parent.kept_from[group]; at < count; ++at) units[group].Use(table[static_cast<size_t>(at)]);
  }
  child->computed = parent.computed;
  child->node = parent.node;
  child->shared = parent.shared;
  child->slot = parent.slot;
  if (has_slots()) units.back().Use(child->slot);
}

void PagePool::Truncate(Sequence* sequence, int64_t tokens) {
  for (size_t group = 0; group < groups.size(); ++group) {
    for (auto& table = sequence->tables[group]; static_cast<int64_t>(table.size()) > PagesOf(tokens); table.pop_back()) {
      if (table.back() != kNoUnit) Drop(group, table.back());
    }
  }
  sequence->computed = std::min(sequence->computed, tokens);
}

void PagePool::Slide(Sequence* sequence, int64_t tokens) {
  for (size_t group = 0; group < groups.size(); ++group) {
    const int64_t first = FirstPage(groups[group].window, tokens);
    auto& table = sequence->tables[group];
    for (int64_t& kept = sequence->kept_from[group]; kept < first; ++kept) {
      if (kept == static_cast<int64_t>(table.size())) table.push_back(kNoUnit);
      int32_t& page = table[static_cast<size_t>(kept)];
      if (page != kNoUnit) Drop(group, std::exchange(page, kNoUnit));
    }
  }
}

void PagePool::Release(Sequence* sequence) {
  Truncate(sequence, 0);
  std::fill(sequence->kept_from.begin(), sequence->kept_from.end(), 0);
  for (const int32_t slot : {sequence->slot, sequence->next_slot == sequence->slot ? kNoUnit : sequence->next_slot}) {
    if (slot != kNoUnit) Drop(groups.size(), slot);
  }
  sequence->slot = sequence->next_slot = kNoUnit;
  sequence->checkpoint.reset();
  sequence->shared = 0;
  sequence->node = nullptr;
}

void PagePool::Drop(size_t kind, int32_t unit) {
  if (!units[kind].Drop(unit)) return;
  ++frees;
  // The copy that was to be made here is not needed, and its source is not kept.
  for (size_t at = 0; at < copies_.size();) {
    const PageCopy copy = copies_[at];
    if (copy.target != unit || copy.group != kind) {
      ++at;
      continue;
    }
    copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(at));
    Drop(kind, copy.source);
    at = 0;
  }
}

}  // namespace mlcpipe::serving
