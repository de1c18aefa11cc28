// Full pages by what they hold, so that a prompt starts where another one with the same beginning has come to
// (mlcpipe/runtime/serving/prefix_tree.py).
#ifndef MLCPIPE_RUNTIME_SERVING_PREFIX_TREE_H_
#define MLCPIPE_RUNTIME_SERVING_PREFIX_TREE_H_

#include <deque>
#include <list>
#include <map>
#include <set>
#include <unordered_map>

#include "serving/page_pool.h"

namespace mlcpipe::serving {

// A full page, or below the root one for each family. It says which of its tokens were computed with the arithmetic of
// answers: pages that differ in it differ in bits. States in slots are what they are after one token: a node may have the slot
// of those after its last one, a checkpoint, and a prompt can start only after such a node.
class Node {
 public:
  using Tokens = std::array<int32_t, kPage>;

  Node(Node* parent, const Tokens& tokens, uint32_t decode_mask, size_t kinds, int64_t number, uint64_t key)
      : parent(parent), tokens(tokens), decode_mask(decode_mask), number(number), key(key), units(kinds, kNoUnit) {}

  Node* const parent;  // null: of a family
  const Tokens tokens;
  const uint32_t decode_mask;
  const int64_t number;        // older ones have lower numbers
  const uint64_t key;          // of its tokens and those before
  std::vector<int32_t> units;  // by kind as of the pool: a page of each group, the slot; kNoUnit where there is none
  std::map<Tokens, std::vector<std::unique_ptr<Node>>> children;

  bool has_units() const {
    return std::any_of(units.begin(), units.end(), [](int32_t unit) { return unit != kNoUnit; });
  }
};

// All full pages that sequences have computed, until their memory is needed. A sequence uses every page of its path in groups
// without a window, and drops them from the end: among the idle ones the least recently used is always a leaf.
class PrefixTree {
 public:
  // Prompts longer than `recompute_above` have other frequencies of RoPE; those of prompts longer than `rope_above` depend on
  // the length itself.
  PrefixTree(PagePool* pool, std::optional<int64_t> recompute_above, std::optional<int64_t> rope_above)
      : pool_(pool), recompute_above_(recompute_above), rope_above_(rope_above), owners_(pool->units.size()) {}

  // Nodes with which the sequence could start: not its last token, which has to be computed to draw the next.
  std::vector<Node*> Match(const Sequence& sequence) const;
  // Why a sequence that starts with what was found did not find more (mlcpipe/runtime/serving/cache_miss.py).
  CacheMiss MissOf(const Sequence& sequence) const;
  // The sequence, which has no pages, starts with those that are found; `PagePool::Release` undoes it.
  void Take(Sequence* sequence);
  // Pages for so many more rows, if need be those of unused prefixes; false if there are not enough.
  bool Reserve(Sequence* sequence, int64_t rows);
  // Whether the sequence has all that follows its first so many tokens: windows and slots have lost some.
  bool CanGoBack(const Sequence& sequence, int64_t tokens) const;
  // The sequence keeps its first so many tokens, to which it `CanGoBack`.
  void GoBack(Sequence* sequence, int64_t tokens);
  // Full pages of the sequence become findable. Where one is known already, the sequence continues with that one.
  void Add(Sequence* sequence);
  // Where the sequence is at the end of a page, a prompt may start after it: its slot is the node's from now on. Its
  // checkpoint before goes where it is too close to the one before that, so that a long answer leaves few.
  void LeaveCheckpoint(Sequence* sequence);
  // Where to split a prompt whose last tokens, from `begin` to `end`, are computed: `end` if nowhere. There a prompt may start
  // that begins with this one: after its messages (`PageBorders`), or all but its last token, in whole pages.
  int64_t CheckpointBefore(int64_t begin, int64_t end, const std::vector<int64_t>& borders) const;
  // Where a chunk of a prompt ends that has room up to `end`: at a border of messages, if half of it stays.
  int64_t ChunkBefore(int64_t begin, int64_t end, const std::vector<int64_t>& borders) const;
  // Frees so many idle units of each kind, the least recently used first; false, and no change, if too few.
  bool Evict(const std::vector<int64_t>& counts);
  // Pages that only this sequence uses are not found any more, nor those after them: their numbers are not finite.
  void Discard(Sequence* sequence);
  // Keeps the full pages of the sequence's prompt, as far as they are computed, until `Unpin`.
  void Pin(const Sequence& sequence);
  // Lets the prefix be evicted that was pinned first.
  void Unpin();
  bool has_pins() const { return !pins_.empty(); }

  // Sequences of one family with the same first tokens can share pages.
  using Family = std::tuple<std::string, bool, int64_t>;
  Family FamilyOf(const Sequence& sequence) const;

 private:
  struct Place {
    size_t kind;
    int32_t unit;
    int64_t at;  // in the sequence's table
  };

  PagePool* pool_;
  std::optional<int64_t> recompute_above_, rope_above_;
  int64_t next_number_ = 0;
  std::map<Family, Node> families_;
  std::vector<std::unordered_map<int32_t, Node*>> owners_;  // by kind, of each unit
  std::list<std::vector<Place>> pins_;
  std::vector<std::unique_ptr<Node>> removed_;  // that the running call may still read

  std::set<std::pair<uint64_t, size_t>> evicted_;  // (key of a node, kind) of lost units, the last ones
  std::deque<std::pair<uint64_t, size_t>> evicted_order_;

  static uint64_t KeyOf(const Family& family);
  static uint64_t KeyOf(uint64_t parent, const Node::Tokens& tokens);
  void NoteEvicted(const Node& node, size_t kind);
  CacheMiss Gone(const std::vector<Node*>& rest) const;
  CacheMiss NotKnown(const Sequence& sequence, const std::vector<Node*>& known) const;
  // The nodes of its tokens, whether or not it could start with them.
  std::vector<Node*> Known(const Sequence& sequence) const;
  size_t Usable(const std::vector<Node*>& nodes) const;
  std::vector<Place> PlacesOf(const std::vector<Node*>& nodes) const;
  // The node of its family; those of families without pages go.
  Node* RootOf(const Sequence& sequence);
  Node* Child(Node* node, const Node::Tokens& tokens, uint32_t decode_mask);
  void Share(Node* node, Sequence* sequence, size_t at);
  // Whether a node loses its units of this kind alone: the others are needed by all that is below.
  bool Sheds(size_t kind) const { return kind == pool_->groups.size() || pool_->groups[kind].window; }
  // The node and the sequence have one unit: the node's, or `own` where it has none. Returns it.
  int32_t ShareUnit(Node* node, size_t kind, int32_t own);
  void Forget(Node* node, size_t kind);
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_PREFIX_TREE_H_
