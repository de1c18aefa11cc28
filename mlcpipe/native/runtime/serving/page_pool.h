// Which sequences use which pages and slots (mlcpipe/runtime/serving/page_pool.py). No data is moved here.
#ifndef MLCPIPE_RUNTIME_SERVING_PAGE_POOL_H_
#define MLCPIPE_RUNTIME_SERVING_PAGE_POOL_H_

#include "serving/sequence.h"
#include "units.h"

namespace mlcpipe::serving {

// States that share page ids.
struct PageGroup {
  int64_t pages = 0;
  int64_t window = 0;  // tokens that a query sees, itself included; 0: all
};

// A sequence has the states after its computed tokens in `slot`; a step reads that one and writes `next_slot`. That is another
// one where others use the slot too, or the tree holds it: so forks and checkpoints copy nothing. Where a draft is checked the
// step writes `row_slots` too, the states after each row: that of the last accepted one is kept.
class PagePool {
 public:
  PagePool(std::vector<PageGroup> groups, int64_t slots);

  // Gives pages for so many more tokens, each to be written by this sequence alone, and a slot for the states after them;
  // false, and no change, if not free. A page that others use too is replaced by a copy.
  bool Reserve(Sequence* sequence, int64_t rows);
  // A step has computed so many more tokens of the sequence, `of_draft` of them of `drafted`.
  void Advance(Sequence* sequence, int64_t rows, size_t of_draft = 0, size_t drafted = 0);
  // A step has failed; `Request::redraws` kept the states before it.
  void Repeat(Sequence* sequence);
  // By kind of unit, how many `Reserve` would need beyond the free ones; negative where some would be left.
  std::vector<int64_t> Missing(const Sequence& sequence, int64_t rows) const;
  // The copies that reservations since the last call need before anything is written.
  std::vector<PageCopy> TakeCopies();
  // Units of a kind that are free, or would be if the tree gave up the idle ones.
  int64_t available(size_t kind) const { return units[kind].available(); }
  // `child` starts with what `parent` has computed, and its tokens are those of the parent up to there.
  void Fork(const Sequence& parent, Sequence* child);
  // Keeps the pages of the first so many tokens; what follows in the last one is written again.
  void Truncate(Sequence* sequence, int64_t tokens);
  // Gives back what no query of the sequence after so many tokens sees; such pages are not reserved later.
  void Slide(Sequence* sequence, int64_t tokens);
  // The sequence uses nothing; its last page is dropped first, so that a prefix outlives what follows it.
  void Release(Sequence* sequence);
  // One use of a page, or a slot, less.
  void Drop(size_t kind, int32_t unit);
  bool has_slots() const { return units.size() > groups.size(); }

  const std::vector<PageGroup> groups;
  std::vector<UnitPool> units;  // the pages of each group, then the slots, if there are any
  int64_t frees = 0;            // counts releases, so that a blocked request is tried again only after one

 private:
  std::vector<PageCopy> copies_;

  bool SharesEnd(size_t group, const Sequence& sequence) const;
  bool HasNextSlot(const Sequence& sequence) const;
  void DropSlots(Sequence* sequence, std::initializer_list<int32_t> slots);
  int64_t MissingOf(size_t kind, const Sequence& sequence, int64_t rows) const;
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_PAGE_POOL_H_
