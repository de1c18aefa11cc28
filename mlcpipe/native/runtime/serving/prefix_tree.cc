#include "serving/prefix_tree.h"

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
  const int64_t length = sequence.few_from;
  return {sequence.request.cache_salt, recompute_above_ && length > *recompute_above_,
          rope_above_ ? std::max(length, *rope_above_) : 0};
}

// Nodes with which the sequence could start: not its last token, which has to be computed to draw the next.
std::vector<Node*> PrefixTree::Match(const Sequence& sequence) {
  std::vector<Node*> found;
  const auto family = families_.find(FamilyOf(sequence));
  if (family == families_.end()) return found;
  Node* node = &family->second;
  for (int64_t at = 0; at < (sequence.length() - 1) / kPage; ++at) {
    const auto variants = node->children.find(TokensOf(sequence, at));
    if (variants == node->children.end()) break;
    const auto& all = variants->second;
    const uint32_t mask = sequence.FewMask(at);
    auto best = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one->few_mask == mask; });
    if (best == all.end()) {
      if (sequence.request.deterministic) break;
      best = all.begin();
    }
    node = best->get();
    found.push_back(node);
  }
  found.resize(Usable(found));
  return found;
}

// With how many of these nodes a sequence can start: every page that a query after them sees is there.
size_t PrefixTree::Usable(const std::vector<Node*>& nodes) const {
  const PageGroup& about = pool_->groups.back();
  if (!about.window) return nodes.size();
  int64_t run = 0, usable = 0;  // `run`: pages in a row that are there
  for (int64_t count = 1; count <= static_cast<int64_t>(nodes.size()); ++count) {
    run = nodes[static_cast<size_t>(count - 1)]->pages.back() != kNoPage ? run + 1 : 0;
    if (run >= count - about.KeptFrom(count * kPage)) usable = count;
  }
  return static_cast<size_t>(usable);
}

// What a sequence that starts with these nodes needs.
std::vector<PrefixTree::Place> PrefixTree::PlacesOf(const std::vector<Node*>& nodes) const {
  std::vector<Place> places;
  const auto count = static_cast<int64_t>(nodes.size());
  for (size_t group = 0; group < pool_->groups.size(); ++group) {
    for (int64_t at = pool_->groups[group].KeptFrom(count * kPage); at < count; ++at) {
      places.push_back({group, nodes[static_cast<size_t>(at)]->pages[group], at});
    }
  }
  return places;
}

void PrefixTree::Take(Sequence* sequence) {
  const std::vector<Node*> nodes = Match(*sequence);
  const auto count = static_cast<int64_t>(nodes.size());
  for (const Place& place : PlacesOf(nodes)) {
    pool_->pages[place.group].Use(place.page);
    auto& table = sequence->tables[place.group];
    table.resize(static_cast<size_t>(place.at), kNoPage);
    table.push_back(place.page);
  }
  for (size_t group = 0; group < pool_->groups.size(); ++group) {
    sequence->kept_from[group] = pool_->groups[group].KeptFrom(count * kPage);
  }
  sequence->computed = count * kPage;
  sequence->node = nodes.empty() ? nullptr : nodes.back();
  sequence->shared = count;
}

Node* PrefixTree::Child(Node* node, const Node::Tokens& tokens, uint32_t few_mask) {
  auto& variants = node->children[tokens];
  for (const auto& one : variants) {
    if (one->few_mask == few_mask) return one.get();
  }
  return variants.emplace_back(std::make_unique<Node>(node, tokens, few_mask, pool_->groups.size(), next_number_++))
      .get();
}

Node* PrefixTree::RootOf(const Sequence& sequence) {
  const Family family = FamilyOf(sequence);
  if (!families_.count(family)) {
    for (auto one = families_.begin(); one != families_.end();) {
      one = one->second.children.empty() ? families_.erase(one) : std::next(one);
    }
  }
  return &families_.try_emplace(family, nullptr, Node::Tokens{}, 0, pool_->groups.size(), next_number_++).first->second;
}

// The numbers of a page that is known are the same: a row's depend on the tokens before it and on their arithmetic alone.
void PrefixTree::Add(Sequence* sequence) {
  for (; sequence->shared < sequence->computed / kPage; ++sequence->shared) {
    const int64_t at = sequence->shared;
    Node* const node = sequence->node ? sequence->node : RootOf(*sequence);
    sequence->node = Child(node, TokensOf(*sequence, at), sequence->FewMask(at));
    Share(sequence->node, sequence, static_cast<size_t>(at));
  }
}

// The node and the sequence have one page in each group, the node's if it has one.
void PrefixTree::Share(Node* node, Sequence* sequence, size_t at) {
  for (size_t group = 0; group < pool_->groups.size(); ++group) {
    const int32_t known = node->pages[group], own = sequence->tables[group][at];
    if (own == kNoPage || known == own) continue;
    if (known == kNoPage) {
      node->pages[group] = own;
      owners_[group][own] = node;
      pool_->pages[group].Hold(own);
    } else {
      pool_->pages[group].Use(known);
      sequence->tables[group][at] = known;
      pool_->Drop(group, own);
    }
  }
}

bool PrefixTree::Evict(const std::vector<int64_t>& counts) {
  std::vector<int64_t> free;
  for (size_t group = 0; group < counts.size(); ++group) {
    free.push_back(pool_->pages[group].free() + counts[group]);
    if (free.back() > pool_->pages[group].available()) return false;
  }
  for (size_t group = 0; group < counts.size(); ++group) {  // a page of the first group takes that of the second along
    const Pages& pages = pool_->pages[group];
    while (pages.free() < free[group]) Forget(owners_[group].at(pages.oldest_idle()), group);
  }
  removed_.clear();
  return true;
}

// A page leaves the tree; a page without a window takes its node, a leaf, along.
void PrefixTree::Forget(Node* node, size_t group) {
  const bool leaf = !pool_->groups[group].window;
  for (size_t each = 0; each < node->pages.size(); ++each) {
    int32_t& page = node->pages[each];
    if (page == kNoPage || !(leaf || each == group)) continue;
    pool_->pages[each].LetGo(page);
    owners_[each].erase(page);
    page = kNoPage;
  }
  while (node->parent && node->children.empty() && !node->has_pages()) {
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
      for (size_t group = 0; group < one->pages.size(); ++group) {
        const int32_t page = one->pages[group];
        if (page != kNoPage && pool_->pages[group].uses(page) > (sequence->tables[group][at] == page)) node = nullptr;
      }
    }
    if (!node) break;  // others use it
    Node* const parent = node->parent;
    for (auto one = below.rbegin(); one != below.rend(); ++one) {
      for (size_t group = 0; group < (*one)->pages.size(); ++group) {
        if ((*one)->pages[group] != kNoPage) Forget(*one, group);
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
  for (const Place& place : pins_.back()) pool_->pages[place.group].Use(place.page);
}

void PrefixTree::Unpin() {
  const std::vector<Place> places = std::move(pins_.front());
  pins_.pop_front();
  for (auto place = places.rbegin(); place != places.rend(); ++place) pool_->Drop(place->group, place->page);
}

}  // namespace mlcpipe::serving
