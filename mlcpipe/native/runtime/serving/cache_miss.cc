#include "serving/prefix_tree.h"

namespace mlcpipe::serving {
namespace {

constexpr size_t kMostEvicted = 1 << 14;  // of which is remembered that they were here

uint64_t Mixed(uint64_t key, uint64_t value) {  // FNV-1a over words, and a shift for its weak low bits
  key = (key ^ value) * 0x100000001b3ULL;
  return key ^ key >> 29;
}

}  // namespace

uint64_t PrefixTree::KeyOf(const Family& family) {
  const auto& [salt, other, length] = family;
  return Mixed(Mixed(std::hash<std::string>()(salt), other), static_cast<uint64_t>(length));
}

uint64_t PrefixTree::KeyOf(uint64_t parent, const Node::Tokens& tokens) {
  for (const int32_t token : tokens) parent = Mixed(parent, static_cast<uint64_t>(token));
  return parent;
}

void PrefixTree::NoteEvicted(const Node& node, size_t kind) {
  const std::pair<uint64_t, size_t> entry(node.key, kind);
  if (!evicted_.insert(entry).second) return;
  evicted_order_.push_back(entry);
  if (evicted_order_.size() <= kMostEvicted) return;
  evicted_.erase(evicted_order_.front());
  evicted_order_.pop_front();
}

CacheMiss PrefixTree::MissOf(const Sequence& sequence) const {
  const int64_t start = sequence.computed / kPage;
  if (start >= (sequence.length() - 1) / kPage) return {};
  const std::vector<Node*> known = Known(sequence);
  return static_cast<int64_t>(known.size()) > start ? Gone({known.begin() + start, known.end()})
                                                    : NotKnown(sequence, known);
}

// The pages after the start are there, but not what the next token needs of the rest.
CacheMiss PrefixTree::Gone(const std::vector<Node*>& rest) const {
  const size_t slots = pool_->groups.size();
  const auto any = [&](const auto& of) { return std::any_of(rest.begin(), rest.end(), of); };
  if (!pool_->has_slots() || any([](const Node* node) { return node->units.back() != kNoUnit; })) {
    return {"evicted"};  // of a window
  }
  return {any([&](const Node* node) { return evicted_.count({node->key, slots}) != 0; }) ? "state_evicted"
                                                                                         : "no_checkpoint"};
}

// The page after the known ones is not there.
CacheMiss PrefixTree::NotKnown(const Sequence& sequence, const std::vector<Node*>& known) const {
  const Family own = FamilyOf(sequence);
  const auto root = families_.find(own);
  const auto lives = [](const auto& family) { return !family.second.children.empty(); };
  const Node* const first = root != families_.end() && lives(*root) ? &root->second : nullptr;
  const Node* const node = known.empty() ? first : known.back();
  const auto pages = static_cast<int64_t>(known.size());
  Node::Tokens page;
  std::copy_n(sequence.tokens.begin() + pages * kPage, kPage, page.begin());
  if (evicted_.count({KeyOf(node ? node->key : KeyOf(own), page), 0})) return {"evicted"};
  if (node && node->children.count(page)) return {"deterministic"};  // computed as an answer
  if (known.empty()) {
    for (const auto& family : families_) {
      const bool other = std::get<0>(family.first) == std::get<0>(own) && family.first != own;
      if (other && family.second.children.count(page)) return {"length_differs"};
    }
  }
  if (!node) return {"first_prompt"};
  if (node->children.empty()) return {};
  std::ptrdiff_t same = 0;
  for (const auto& child : node->children) {
    same = std::max(same, std::mismatch(page.begin(), page.end(), child.first.begin()).first - page.begin());
  }
  return {"prompt_differs", pages * kPage + same};
}

}  // namespace mlcpipe::serving
