// Which tokens the pages and slots of a model hold: several sequences, which share whole pages of what they begin with.
#ifndef MLCPIPE_RUNTIME_SEQUENCES_H_
#define MLCPIPE_RUNTIME_SEQUENCES_H_

#include <cstdint>
#include <list>
#include <vector>

#include "page.h"
#include "units.h"

namespace mlcpipe {

// A slot after the first `length` tokens.
struct Checkpoint {
  int64_t length;
  int32_t slot;
};

struct Sequence {
  std::vector<int32_t> tokens;          // computed ones first; the rest may be of before
  std::vector<int32_t> pages;           // for `length` tokens or more
  int64_t length = 0;                   // tokens that are computed
  int64_t prompt_length = 0;            // tokens that were computed as a prompt's
  int64_t rope = 0;                     // the length that RoPE's frequencies follow, 0: none
  int64_t shortest = 0;                 // what comes after fewer tokens than these may need pages that are not there
  int32_t slot = kNoUnit;                 // after `length` tokens, in models with slots
  std::vector<Checkpoint> checkpoints;  // in models with slots, the shortest first
};

class Sequences {
 public:
  // What the pages of a fork lack: the tokens of a page that is not whole, to be copied.
  struct Copy {
    int32_t from = 0, to = 0;
  };
  // Of a step of the current sequence: kNoUnit reads zeros, and in models without slots nothing.
  struct Slots {
    int32_t read = kNoUnit, write = kNoUnit;
  };

  // Without slots, or with two or more.
  explicit Sequences(int64_t pages, int64_t slots = 0) : pages_(pages), slots_(slots) {}

  // Last used first; there is always one.
  const std::list<Sequence>& all() const { return all_; }
  // What no sequence has.
  const std::vector<int32_t>& free_pages() const { return pages_.free_units(); }
  const std::vector<int32_t>& free_slots() const { return slots_.free_units(); }
  Sequence& current() { return all_.front(); }
  const Sequence& current() const { return all_.front(); }

  // The most of a sequence's first `length` tokens that another one can go on from.
  int64_t Usable(const Sequence& of, int64_t length) const;

  // Makes an empty sequence the current one.
  Sequence& Start();

  // Makes current what has the first `length` tokens of `of`, 1 or more that are usable: itself where it has no others, else
  // a new one; or itself without the others where there is no page for a copy.
  Copy Fork(const Sequence& of, int64_t length);

  // Gives the current sequence pages for so many tokens, at most what all pages hold. Those that were not used for
  // longest are forgotten for it.
  void Reserve(int64_t tokens);

  // The slots of the current sequence's next step. Checkpoints of those that were not used for longest are forgotten for it.
  Slots BeginStep();
  // The step has computed so many tokens.
  void EndStep(int64_t tokens);
  // The step failed: of a state that it wrote over, what the last checkpoint has is left.
  void FailStep();
  // Keeps the slot of the current sequence, if it has one, in place of its oldest checkpoint: another can go on from here.
  void Keep();

  void Clear();

 private:
  std::list<Sequence> all_{1};
  UnitPool pages_, slots_;
  Slots step_;

  void Cut(Sequence* from, int64_t length);
  void DropSlot(int32_t* slot);
  void DropCheckpoint(Sequence* of, size_t at);
  void ForgetCheckpoint();
  void ForgetLast();
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_SEQUENCES_H_
