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
  while (has_slots() && sequence->row_slots.size() < sequence->draft.size()) {
    sequence->row_slots.push_back(units.back().New());
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

void PagePool::Advance(Sequence* sequence, int64_t rows, size_t of_draft, size_t drafted) {
  sequence->computed += rows;
  const int32_t last = std::exchange(sequence->next_slot, kNoUnit);
  if (last == kNoUnit) return;
  const int32_t read = std::exchange(sequence->slot, of_draft < drafted ? sequence->row_slots[of_draft] : last);
  DropSlots(sequence, {read, last});
}

void PagePool::Repeat(Sequence* sequence) {
  DropSlots(sequence, {std::exchange(sequence->next_slot, kNoUnit)});
}

// Of these slots and those after rows only that of the sequence is used from now on.
void PagePool::DropSlots(Sequence* sequence, std::initializer_list<int32_t> slots) {
  std::vector<int32_t>& all = sequence->row_slots;
  all.insert(all.end(), slots);
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  for (const int32_t slot : all) {
    if (slot != kNoUnit && slot != sequence->slot) Drop(groups.size(), slot);
  }
  all.clear();
}

std::vector<int64_t> PagePool::Missing(const Sequence& sequence, int64_t rows) const {
  std::vector<int64_t> missing;
  for (size_t kind = 0; kind < units.size(); ++kind) missing.push_back(MissingOf(kind, sequence, rows));
  return missing;
}

int64_t PagePool::MissingOf(size_t kind, const Sequence& sequence, int64_t rows) const {
  if (kind == groups.size()) {
    const auto drafts = static_cast<int64_t>(sequence.draft.size()) - static_cast<int64_t>(sequence.row_slots.size());
    return !HasNextSlot(sequence) + std::max<int64_t>(0, drafts) - units[kind].free();
  }
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
  Repeat(sequence);
  if (sequence->slot != kNoUnit) Drop(groups.size(), std::exchange(sequence->slot, kNoUnit));
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
