// The state table (mlcpipe/bundle/states.py): the tensors of a model that outlive a step. The runtime allocates bytes, hands
// out the numbers of units and copies units; it does not know what is in them.
#ifndef MLCPIPE_RUNTIME_BUNDLE_STATES_H_
#define MLCPIPE_RUNTIME_BUNDLE_STATES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "../page.h"

namespace mlcpipe {

// An array in a unit, such as the keys of a head.
struct StatePart {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t token_axis;  // of a page's tokens, kNoUnit in a slot
  int64_t bytes;
};

// A tensor dtype[units, unit_bytes / bytes of an element]. A unit has all parts, one after another, `copies` times. It is a
// page, or a slot: what a sequence keeps however long it is.
struct State {
  std::string name, dtype;
  bool paged;
  int64_t window;  // tokens that a query sees, itself included; 0: all
  int64_t copies;
  std::vector<StatePart> parts;
  int64_t item_bytes, unit_bytes;
  size_t group = 0;  // of pages: whose page numbers it has

  // Which of a sequence's units are needed after so many tokens, 1 or more: pages from `first` on, or its slot.
  struct Units {
    int64_t first, count;
  };
  Units NeededAfter(int64_t tokens) const;

  // Makes the places of no token 0 in the last page of so many tokens.
  void ClearUnused(int64_t tokens, uint8_t* unit) const;
};

class StateTable {
 public:
  StateTable() = default;
  // One or more, in the order of the library's arguments.
  explicit StateTable(std::vector<State> states);

  const std::vector<State>& all() const { return all_; }
  // Of each group of pages: those that lose the same tokens share page numbers. The first sees the most; there is always one.
  const std::vector<int64_t>& windows() const { return windows_; }
  bool has_slots() const { return slot_bytes_ != 0; }
  // In the pages of all states.
  int64_t bytes_per_token() const { return page_bytes_ / kPage; }
  // Of a slot of all states.
  int64_t slot_bytes() const { return slot_bytes_; }
  // Of what is needed after so many tokens.
  int64_t BytesAfter(int64_t tokens) const;
  // SHA-256 that tells saved chats of one table from those of another.
  std::string Hash() const;

 private:
  std::vector<State> all_;
  std::vector<int64_t> windows_;
  int64_t page_bytes_ = 0, slot_bytes_ = 0;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_BUNDLE_STATES_H_
