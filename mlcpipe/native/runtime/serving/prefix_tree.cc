#include "serving/prefix_tree.h"

#include "serving/message_borders.h"

namespace mlcpipe::serving {
namespace {

Node::Tokens TokensOf(const Sequence& sequence, int64_t page) {
  Node::Tokens tokens;
  std::copy_n(sequence.tokens.begin() + page * kPage, kPage, tokens.begin());
  return tokens;
}

// A node, then all below it in the order in which Python's tree names them.
std::vector<Node*> Below(Node* top) {
  std::vector<Node*> found{top}, open{top};
  while (!open.empty()) {
    std::vector<const std::vector<std::unique_ptr<Node>>*> children;
    for (const auto& variants : open.back()->children) children.push_back(&variants.second);
    open.pop_back();
    std::sort(children.begin(), children.end(),
              [](const auto* a, const auto* b) { return a->front()->number < b->front()->number; });
    for (const auto* variants : children) {
      for (const auto& one : *variants) {
        found.push_back(one.get());
        open.push_back(one.get());
      }
    }
  }
  return found;
}

}  // namespace

PrefixTree::Family PrefixTree::FamilyOf(const Sequence& sequence) const {
  const int64_t length = sequence.decode_from;
  return {sequence.request.cache_salt, recompute_above_ && length > *recompute_above_,
          rope_above_ ? std::max(length, *rope_above_) : 0};
}

std::vector<Node*> PrefixTree::Match(const Sequence& sequence) const {
  std::vector<Node*> found = Known(sequence);
  found.resize(Usable(found));
  return found;
}

std::vector<Node*> PrefixTree::Known(const Sequence& sequence) const {
  std::vector<Node*> found;
  const auto family = families_.find(FamilyOf(sequence));
  if (family == families_.end()) return found;
  const Node* node = &family->second;
  for (int64_t at = 0; at < (sequence.length() - 1) / kPage; ++at) {
    const auto variants = node->children.find(TokensOf(sequence, at));
    if (variants == node->children.end()) break;
    const auto& all = variants->second;
    const uint32_t mask = sequence.DecodeMask(at);
    auto best = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one->decode_mask == mask; });
    if (best == all.end()) {
      if (sequence.request.deterministic) break;
      best = all.begin();
    }
    node = best->get();
    found.push_back(best->get());
  }
  return found;
}

// With how many of these nodes a sequence can start: all that the token after them needs is there.
size_t PrefixTree::Usable(const std::vector<Node*>& nodes) const {
  const auto& groups = pool_->groups;
  std::vector<int64_t> runs(groups.size());  // pages in a row that are there
  int64_t usable = 0;
  for (int64_t count = 1; count <= static_cast<int64_t>(nodes.size()); ++count) {
    const Node& node = *nodes[static_cast<size_t>(count - 1)];
    bool there = !pool_->has_slots() || node.units.back() != kNoUnit;
    for (size_t group = 0; group < groups.size(); ++group) {
      runs[group] = node.units[group] != kNoUnit ? runs[group] + 1 : 0;
      there = there && runs[group] >= count - FirstPage(groups[group].window, count * kPage);
    }
    if (there) usable = count;
  }
  return static_cast<size_t>(usable);
}

// The units that a sequence with these nodes at its start needs; last the slot, if there are any.
std::vector<PrefixTree::Place> PrefixTree::PlacesOf(const std::vector<Node*>& nodes) const {
  std::vector<Place> places;
  const auto count = static_cast<int64_t>(nodes.size());
  for (size_t group = 0; group < pool_->groups.size(); ++group) {
    for (int64_t at = FirstPage(pool_->groups[group].window, count * kPage); at < count; ++at) {
      places.push_back({group, nodes[static_cast<size_t>(at)]->units[group], at});
    }
  }
  if (pool_->has_slots() && count) places.push_back({pool_->groups.size(), nodes.back()->units.back(), count - 1});
  return places;
}

void PrefixTree::Take(Sequence* sequence) {
  const std::vector<Node*> nodes = Match(*sequence);
  const auto count = static_cast<int64_t>(nodes.size());
  for (const Place& place : PlacesOf(nodes)) {
    pool_->units[place.kind].Use(place.unit);
    if (place.kind == pool_->groups.size()) {
      sequence->slot = place.unit;
      continue;
    }
    auto& table = sequence->tables[place.kind];
    table.resize(static_cast<size_t>(place.at), kNoUnit);
    table.push_back(place.unit);
  }
  for (size_t group = 0; group < pool_->groups.size(); ++group) {
    sequence->kept_from[group] = FirstPage(pool_->groups[group].window, count * kPage);
  }
  sequence->computed = count * kPage;
  sequence->node = nodes.empty() ? nullptr : nodes.back();
  sequence->shared = count;
}

Node* PrefixTree::Child(Node* node, const Node::Tokens& tokens, uint32_t decode_mask) {
  auto& variants = node->children[tokens];
  for (const auto& one : variants) {
    if (one->decode_mask == decode_mask) return one.get();
  }
  const uint64_t key = KeyOf(node->key, tokens);
  return variants
      .emplace_back(std::make_unique<Node>(node, tokens, decode_mask, pool_->units.size(), next_number_++, key))
      .get();
}

Node* PrefixTree::RootOf(const Sequence& sequence) {
  const Family family = FamilyOf(sequence);
  if (!families_.count(family)) {
    for (auto one = families_.begin(); one != families_.end();) {
      one = one->second.children.empty() ? families_.erase(one) : std::next(one);
    }
  }
  return &families_
              .try_emplace(family, nullptr, Node::Tokens{}, 0, pool_->units.size(), next_number_++, KeyOf(family))
              .first->second;
}

// The numbers of a page that is known are the same: a row's depend on the tokens before it and on their arithmetic alone.
void PrefixTree::Add(Sequence* sequence) {
  for (; sequence->shared < sequence->computed / kPage; ++sequence->shared) {
    const int64_t at = sequence->shared;
    Node* const node = sequence->node ? sequence->node : RootOf(*sequence);
    sequence->node = Child(node, TokensOf(*sequence, at), sequence->DecodeMask(at));
    Share(sequence->node, sequence, static_cast<size_t>(at));
  }
}

void PrefixTree::Share(Node* node, Sequence* sequence, size_t at) {
  for (size_t group = 0; group < pool_->groups.size(); ++group) {
    int32_t& own = sequence->tables[group][at];
    if (own != kNoUnit) own = ShareUnit(node, group, own);
  }
}

int32_t PrefixTree::ShareUnit(Node* node, size_t kind, int32_t own) {
  int32_t& known = node->units[kind];
  if (known == kNoUnit) {
    known = own;
    owners_[kind][own] = node;
    pool_->units[kind].Hold(own);
  } else if (known != own) {
    pool_->units[kind].Use(known);
    pool_->Drop(kind, own);
  }
  return known;
}

void PrefixTree::LeaveCheckpoint(Sequence* sequence) {
  Node* const node = sequence->node;
  if (!pool_->has_slots() || !node || sequence->computed != sequence->shared * kPage) return;
  const size_t kind = pool_->groups.size();
  sequence->slot = ShareUnit(node, kind, sequence->slot);
  int64_t before = 0;
  if (const auto& last = sequence->checkpoint; last && last->node != node->number) {
    before = last->tokens;
    if (last->tokens - last->before < kCheckpointTokens) {
      before = last->before;
      const auto owner = owners_[kind].find(last->slot);  // another node, where the slot was evicted
      const bool still = owner != owners_[kind].end() && owner->second->number == last->node;
      if (still && !pool_->units[kind].uses(last->slot)) Forget(owner->second, kind);
      removed_.clear();
    }
  }
  sequence->checkpoint = {node->number, sequence->slot, sequence->computed, before};
}

int64_t PrefixTree::CheckpointBefore(int64_t begin, int64_t end, const std::vector<int64_t>& borders) const {
  if (!pool_->has_slots()) return end;
  const int64_t last = (end - 1) / kPage * kPage;
  return BorderBetween(borders, begin, end).value_or(last - begin >= kCheckpointTokens ? last : end);
}

int64_t PrefixTree::ChunkBefore(int64_t begin, int64_t end, const std::vector<int64_t>& borders) const {
  return pool_->has_slots() ? BorderBetween(borders, begin, end, 0.5).value_or(end) : end;
}

bool PrefixTree::Reserve(Sequence* sequence, int64_t rows) {
  if (pool_->Reserve(sequence, rows)) return true;
  return Evict(pool_->Missing(*sequence, rows)) && pool_->Reserve(sequence, rows);
}

bool PrefixTree::CanGoBack(const Sequence& sequence, int64_t tokens) const {
  if (tokens == sequence.computed) return true;
  for (size_t group = 0; group < pool_->groups.size(); ++group) {
    if (FirstPage(pool_->groups[group].window, tokens) < sequence.kept_from[group]) return false;
  }
  return !pool_->has_slots();
}

void PrefixTree::GoBack(Sequence* sequence, int64_t tokens) {
  pool_->Truncate(sequence, tokens);
  for (; sequence->shared > tokens / kPage; --sequence->shared) sequence->node = sequence->node->parent;
  if (!sequence->shared) sequence->node = nullptr;
}

bool PrefixTree::Evict(const std::vector<int64_t>& counts) {
  std::vector<int64_t> free;
  for (size_t kind = 0; kind < counts.size(); ++kind) {
    free.push_back(pool_->units[kind].free() + counts[kind]);
    if (free.back() > pool_->units[kind].available()) return false;
  }
  for (size_t kind = 0; kind < counts.size(); ++kind) {  // a page without a window takes the other units along
    const UnitPool& units = pool_->units[kind];
    while (units.free() < free[kind]) {
      Node* const node = owners_[kind].at(units.oldest_idle());
      NoteEvicted(*node, kind);
      Forget(node, kind);
    }
  }
  removed_.clear();
  return true;
}

// A unit leaves the tree; a page without a window takes its node, a leaf, along.
void PrefixTree::Forget(Node* node, size_t kind) {
  const bool leaf = !Sheds(kind);
  for (size_t each = 0; each < node->units.size(); ++each) {
    int32_t& unit = node->units[each];
    if (unit == kNoUnit || !(leaf || each == kind)) continue;
    pool_->units[each].LetGo(unit);
    owners_[each].erase(unit);
    unit = kNoUnit;
  }
  while (node->parent && node->children.empty() && !node->has_units()) {
    Node* const parent = node->parent;
    const auto variants = parent->children.find(node->tokens);
    auto& all = variants->second;
    const auto own = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.get() == node; });
    removed_.push_back(std::move(*own));
    all.erase(own);
    if (all.empty()) parent->children.erase(variants);
    node = parent;
  }
}

void PrefixTree::Discard(Sequence* sequence) {
  Node* node = sequence->node;
  for (size_t at = static_cast<size_t>(sequence->shared); at-- > 0;) {
    const std::vector<Node*> below = Below(node);
    for (const Node* one : below) {
      for (size_t kind = 0; kind < one->units.size(); ++kind) {
        const int32_t unit = one->units[kind];
        const int32_t own = kind < pool_->groups.size() ? sequence->tables[kind][at] : sequence->slot;
        if (unit != kNoUnit && pool_->units[kind].uses(unit) > (own == unit)) node = nullptr;
      }
    }
    if (!node) break;  // others use it
    Node* const parent = node->parent;
    for (auto one = below.rbegin(); one != below.rend(); ++one) {
      for (size_t kind = 0; kind < (*one)->units.size(); ++kind) {
        if ((*one)->units[kind] != kNoUnit) Forget(*one, kind);
      }
    }
    node = parent;
  }
  removed_.clear();
  sequence->node = nullptr;
  sequence->shared = 0;
}

void PrefixTree::Pin(const Sequence& sequence) {
  std::vector<Node*> nodes;
  for (Node* node = sequence.node; node && node->parent; node = node->parent) nodes.insert(nodes.begin(), node);
  nodes.resize(std::min<size_t>(nodes.size(), sequence.request.tokens.size() / kPage));
  nodes.resize(Usable(nodes));
  pins_.push_back(PlacesOf(nodes));
  for (const Place& place : pins_.back()) pool_->units[place.kind].Use(place.unit);
}

void PrefixTree::Unpin() {
  const std::vector<Place> places = std::move(pins_.front());
  pins_.pop_front();
  for (auto place = places.rbegin(); place != places.rend(); ++place) pool_->Drop(place->kind, place->unit);
}

}  // namespace mlcpipe::serving
