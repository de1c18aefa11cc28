#include "serving/page_pool.h"

namespace mlcpipe::serving {

Pages::Pages(const PageGroup& group)
    : uses_(static_cast<size_t>(group.pages)), held_(uses_.size()), place_(uses_.size()) {
  for (int64_t page = group.pages; page > 0; --page) free_.push_back(static_cast<int32_t>(page - 1));
}

int32_t Pages::New() {
  const int32_t page = free_.back();
  free_.pop_back();
  uses_[Index(page)] = 1;
  return page;
}

void Pages::Use(int32_t page) {
  if (uses_[Index(page)]++ == 0) idle_.erase(place_[Index(page)]);
}

bool Pages::Drop(int32_t page) {
  if (--uses_[Index(page)]) return false;
  if (held_[Index(page)]) {
    place_[Index(page)] = idle_.insert(idle_.end(), page);
  } else {
    free_.push_back(page);
  }
  return true;
}

void Pages::LetGo(int32_t page) {
  held_[Index(page)] = false;
  if (uses_[Index(page)]) return;
  idle_.erase(place_[Index(page)]);
  free_.push_back(page);
}

PagePool::PagePool(std::vector<PageGroup> of) : groups(std::move(of)) {
  for (const PageGroup& group : groups) pages.emplace_back(group);
}

bool PagePool::Reserve(Sequence* sequence, int64_t rows) {
  for (size_t group = 0; group < groups.size(); ++group) {
    if (MissingOf(group, *sequence, rows) > 0) return false;
  }
  for (size_t group = 0; group < groups.size(); ++group) {
    auto& table = sequence->tables[group];
    if (SharesEnd(group, *sequence)) {
      int32_t& end = table[static_cast<size_t>(sequence->computed / kPage)];
      const int32_t source = end;
      end = pages[group].New();
      copies_.push_back({source, end, group});  // which keeps the use of the source
    }
    while (static_cast<int64_t>(table.size()) < PagesOf(sequence->computed + rows)) table.push_back(pages[group].New());
  }
  return true;
}

std::vector<int64_t> PagePool::Missing(const Sequence& sequence, int64_t rows) const {
  std::vector<int64_t> missing;
  for (size_t group = 0; group < groups.size(); ++group) missing.push_back(MissingOf(group, sequence, rows));
  return missing;
}

int64_t PagePool::MissingOf(size_t group, const Sequence& sequence, int64_t rows) const {
  const int64_t has = static_cast<int64_t>(sequence.tables[group].size());
  const int64_t wanted = std::max<int64_t>(0, PagesOf(sequence.computed + rows) - has);
  return wanted + SharesEnd(group, sequence) - pages[group].free();
}

// Whether the page that the next token goes to has tokens already, and is not this sequence's alone.
bool PagePool::SharesEnd(size_t group, const Sequence& sequence) const {
  if (sequence.computed % kPage == 0) return false;
  const int32_t page = sequence.tables[group][static_cast<size_t>(sequence.computed / kPage)];
  // A copy that is to be made of it is made before anything is written to it.
  const auto copies = std::count_if(copies_.begin(), copies_.end(), [&](const PageCopy& copy) {
    return copy.source == page && copy.group == group;
  });
  return pages[group].uses(page) - copies > 1 || pages[group].held(page);
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
    for (int64_t at = parent.kept_from[group]; at < count; ++at) pages[group].Use(table[static_cast<size_t>(at)]);
  }
  child->computed = parent.computed;
  child->node = parent.node;
  child->shared = parent.shared;
}

void PagePool::Slide(Sequence* sequence) {
  for (size_t group = 0; group < groups.size(); ++group) {
    if (!groups[group].window) continue;
    const int64_t first = groups[group].KeptFrom(sequence->computed);
    int64_t& kept_from = sequence->kept_from[group];
    for (; kept_from < first; ++kept_from) {
      int32_t& page = sequence->tables[group][static_cast<size_t>(kept_from)];
      Drop(group, page);
      page = kNoPage;
    }
  }
}

void PagePool::Release(Sequence* sequence) {
  for (size_t group = 0; group < groups.size(); ++group) {
    for (auto& table = sequence->tables[group]; !table.empty(); table.pop_back()) {
      if (table.back() != kNoPage) Drop(group, table.back());
    }
    sequence->kept_from[group] = 0;
  }
  sequence->computed = sequence->shared = 0;
  sequence->node = nullptr;
}

void PagePool::Drop(size_t group, int32_t page) {
  if (!pages[group].Drop(page)) return;
  ++frees;
  // Nobody needs the copy that was to be made here, nor keeps its source.
  for (size_t at = 0; at < copies_.size();) {
    const PageCopy copy = copies_[at];
    if (copy.target != page || copy.group != group) {
      ++at;
      continue;
    }
    copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(at));
    Drop(group, copy.source);
    at = 0;
  }
}

}  // namespace mlcpipe::serving
