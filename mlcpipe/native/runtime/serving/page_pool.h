// Who uses which page of keys and values (mlcpipe/runtime/serving/page_pool.py). No data is moved here.
#ifndef MLCPIPE_RUNTIME_SERVING_PAGE_POOL_H_
#define MLCPIPE_RUNTIME_SERVING_PAGE_POOL_H_

#include <list>

#include "serving/sequence.h"

namespace mlcpipe::serving {

// Layers that share page ids. A model in which some layers slide has two: those that see all, and those with a window.
struct PageGroup {
  int64_t pages = 0;
  int64_t window = 0;  // tokens that a query sees, itself included; 0: all

  // The first page that a query at this position, or a later one, needs. The last full page is needed in any case.
  int64_t KeptFrom(int64_t position) const {
    return window ? std::max<int64_t>(0, position + 1 - std::max(window, 2 * kPage)) / kPage : 0;
  }
  // Pages that a sequence of so many tokens needs at once, computed in chunks of so many rows.
  int64_t Most(int64_t tokens, int64_t chunk) const {
    return window ? std::min(PagesOf(tokens), PagesOf(window + chunk) + 2) : PagesOf(tokens);
  }
};

// The pages of one group. Each is free, idle (the tree holds it, no sequence uses it), or used.
class Pages {
 public:
  explicit Pages(const PageGroup& group);

  int32_t New();
  void Use(int32_t page);
  // One use less; true where it was the last.
  bool Drop(int32_t page);
  // The tree holds the page, or no longer.
  void Hold(int32_t page) { held_[Index(page)] = true; }
  void LetGo(int32_t page);

  int64_t uses(int32_t page) const { return uses_[Index(page)]; }
  bool held(int32_t page) const { return held_[Index(page)]; }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  const std::vector<int32_t>& free_pages() const { return free_; }
  int64_t available() const { return free() + static_cast<int64_t>(idle_.size()); }
  int32_t oldest_idle() const { return idle_.front(); }

 private:
  std::vector<int32_t> uses_, free_;
  std::vector<bool> held_;
  std::list<int32_t> idle_;  // the least recently used first
  std::vector<std::list<int32_t>::iterator> place_;  // in `idle_`

  static size_t Index(int32_t page) { return static_cast<size_t>(page); }
};

class PagePool {
 public:
  // One group, or one without a window and one with it.
  explicit PagePool(std::vector<PageGroup> groups);

  // Gives pages for so many more tokens, each to be written by this sequence alone; false, and no change, if not free. A page
  // that others use too is replaced by a copy.
  bool Reserve(Sequence* sequence, int64_t rows);
  // By group, how many pages `Reserve` would need beyond the free ones; negative where some would be left.
  std::vector<int64_t> Missing(const Sequence& sequence, int64_t rows) const;
  // The copies that reservations since the last call need before anything is written.
  std::vector<PageCopy> TakeCopies();
  // `child` starts with what `parent` has computed, and its tokens are those of the parent up to there.
  void Fork(const Sequence& parent, Sequence* child);
  // Gives back what no later query of the sequence sees.
  void Slide(Sequence* sequence);
  // The sequence uses no page; the last one is dropped first, so that a prefix outlives what follows it.
  void Release(Sequence* sequence);
  // One use of a page less.
  void Drop(size_t group, int32_t page);

  const std::vector<PageGroup> groups;
  std::vector<Pages> pages;  // by group
  int64_t frees = 0;         // counts what made pages available, so that who waits for some need not ask again before

 private:
  std::vector<PageCopy> copies_;

  bool SharesEnd(size_t group, const Sequence& sequence) const;
  int64_t MissingOf(size_t group, const Sequence& sequence, int64_t rows) const;
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_PAGE_POOL_H_
