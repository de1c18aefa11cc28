#include "sequences.h"

#include <algorithm>

namespace mlcpipe {
namespace {

constexpr size_t kMostSequences = 64;
constexpr size_t kMostCheckpoints = 3;  // of a sequence

}  // namespace

int64_t Sequences::Usable(const Sequence& of, int64_t length) const {
  if (slots_.count() && length < of.length) {
    int64_t last = 0;
    for (const Checkpoint& one : of.checkpoints) last = one.length <= length ? one.length : last;
    length = last;
  }
  return length < of.shortest ? 0 : length;
}

Sequence& Sequences::Start() {
  if (current().length) {
    if (all_.size() == kMostSequences) ForgetLast();
    all_.emplace_front();
  }
  Cut(&current(), 0);
  return current() = Sequence();
}

Sequences::Copy Sequences::Fork(const Sequence& of, int64_t length) {
  const auto source = std::find_if(all_.begin(), all_.end(), [&](const Sequence& one) { return &one == &of; });
  all_.splice(all_.begin(), all_, source);
  if (length == of.length) return {};
  const bool partial = length % kPage != 0;
  if (all_.size() == kMostSequences) ForgetLast();
  while (partial && !pages_.free() && all_.size() > 1) ForgetLast();
  if (partial && !pages_.free()) {
    Cut(&current(), length);
    return {};
  }
  Sequence made;
  made.tokens.assign(of.tokens.begin(), of.tokens.begin() + length);
  made.length = length;
  made.shortest = of.shortest;
  made.pages.assign(of.pages.begin(), of.pages.begin() + length / kPage);
  for (const int32_t page : made.pages) pages_.Use(page);
  for (const Checkpoint& one : of.checkpoints) {
    if (one.length > length) break;
    made.checkpoints.push_back(one);
    slots_.Use(one.slot);
    if (one.length == length) slots_.Use(made.slot = one.slot);
  }
  const int32_t from = of.pages[static_cast<size_t>(PagesOf(length) - 1)];
  all_.push_front(std::move(made));
  if (!partial) return {};
  Reserve(length);
  return {from, current().pages.back()};
}

void Sequences::Reserve(int64_t tokens) {
  auto& pages = current().pages;
  while (static_cast<int64_t>(pages.size()) < PagesOf(tokens)) {
    while (!pages_.free()) ForgetLast();
    pages.push_back(pages_.New());
  }
}

Sequences::Slots Sequences::BeginStep() {
  if (!slots_.count()) return {};
  FailStep();  // of one that neither ended nor failed
  const int32_t read = current().slot;
  const auto alone = [&] { return read != kNoUnit && slots_.uses(read) == 1; };
  while (!alone() && !slots_.free()) ForgetCheckpoint();
  return step_ = {read, alone() ? read : slots_.New()};
}

void Sequences::EndStep(int64_t tokens) {
  current().length += tokens;
  if (step_.write != step_.read) {
    DropSlot(&current().slot);
    current().slot = step_.write;
  }
  step_ = {};
}

void Sequences::FailStep() {
  if (step_.write != step_.read) {
    DropSlot(&step_.write);
  } else if (step_.write != kNoUnit) {
    const auto& kept = current().checkpoints;
    Cut(&current(), kept.empty() ? 0 : kept.back().length);
  }
  step_ = {};
}

void Sequences::Keep() {
  auto& kept = current().checkpoints;
  if (current().slot == kNoUnit || (!kept.empty() && kept.back().length == current().length)) return;
  if (kept.size() == kMostCheckpoints) DropCheckpoint(&current(), 0);
  slots_.Use(current().slot);
  kept.push_back({current().length, current().slot});
}

void Sequences::Clear() {
  while (all_.size() > 1) ForgetLast();
  current().length = 0;
  Start();
}

// The sequence has its first tokens only; in models with slots a checkpoint has so many, or there are none.
void Sequences::Cut(Sequence* from, int64_t length) {
  for (auto& pages = from->pages; static_cast<int64_t>(pages.size()) > PagesOf(length); pages.pop_back()) {
    pages_.Drop(pages.back());
  }
  auto& kept = from->checkpoints;
  while (!kept.empty() && kept.back().length > length) DropCheckpoint(from, kept.size() - 1);
  DropSlot(&from->slot);
  if (!kept.empty() && kept.back().length == length) slots_.Use(from->slot = kept.back().slot);
  from->length = length;
}

void Sequences::DropCheckpoint(Sequence* of, size_t at) {
  slots_.Drop(of->checkpoints[at].slot);
  of->checkpoints.erase(of->checkpoints.begin() + static_cast<std::ptrdiff_t>(at));
}

void Sequences::DropSlot(int32_t* slot) {
  if (*slot != kNoUnit) slots_.Drop(*slot);
  *slot = kNoUnit;
}

// A sequence is worth more than the checkpoints of others, and the last one of its own.
void Sequences::ForgetCheckpoint() {
  for (auto one = all_.rbegin(); one != all_.rend(); ++one) {
    if (one->checkpoints.size() > (&*one == &current())) return DropCheckpoint(&*one, 0);
  }
  if (all_.size() > 1) return ForgetLast();
  DropCheckpoint(&current(), 0);
}

void Sequences::ForgetLast() {
  Cut(&all_.back(), 0);
  all_.pop_back();
}

}  // namespace mlcpipe
