#include "sequences.h"

#include <algorithm>

namespace mlcpipe {
namespace {

constexpr size_t kMostSequences = 64;

}  // namespace

Sequences::Sequences(int64_t pages) : users_(static_cast<size_t>(pages)) {
  for (int64_t page = pages; page > 0; --page) free_.push_back(static_cast<int32_t>(page - 1));
}

Sequence& Sequences::Start() {
  if (current().length) {
    if (all_.size() == kMostSequences) ForgetLast();
    all_.emplace_front();
  }
  Release(&current(), 0);
  return current() = Sequence();
}

Sequences::Copy Sequences::Fork(const Sequence& of, int64_t length) {
  const auto source = std::find_if(all_.begin(), all_.end(), [&](const Sequence& one) { return &one == &of; });
  all_.splice(all_.begin(), all_, source);
  if (length == of.length) return {};
  const bool partial = length % kPage != 0;
  if (all_.size() == kMostSequences) ForgetLast();
  while (partial && free_.empty() && all_.size() > 1) ForgetLast();
  if (partial && free_.empty()) {
    current().length = length;
    Release(&current(), PagesOf(length));
    return {};
  }
  Sequence made;
  made.tokens.assign(of.tokens.begin(), of.tokens.begin() + length);
  made.length = length;
  made.pages.assign(of.pages.begin(), of.pages.begin() + length / kPage);
  for (int32_t page : made.pages) ++users_[static_cast<size_t>(page)];
  const int32_t from = of.pages[static_cast<size_t>(PagesOf(length) - 1)];
  all_.push_front(std::move(made));
  if (!partial) return {};
  Reserve(length);
  return {from, current().pages.back()};
}

void Sequences::Reserve(int64_t tokens) {
  auto& pages = current().pages;
  while (static_cast<int64_t>(pages.size()) < PagesOf(tokens)) {
    while (free_.empty()) ForgetLast();
    pages.push_back(free_.back());
    ++users_[static_cast<size_t>(free_.back())];
    free_.pop_back();
  }
}

void Sequences::Clear() {
  while (all_.size() > 1) ForgetLast();
  current().length = 0;
  Start();
}

void Sequences::Release(Sequence* from, int64_t kept_pages) {
  for (auto& pages = from->pages; static_cast<int64_t>(pages.size()) > kept_pages; pages.pop_back()) {
    if (--users_[static_cast<size_t>(pages.back())] == 0) free_.push_back(pages.back());
  }
}

void Sequences::ForgetLast() {
  Release(&all_.back(), 0);
  all_.pop_back();
}

}  // namespace mlcpipe
