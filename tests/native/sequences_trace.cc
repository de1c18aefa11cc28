// Random prompts and answers over few pages and slots: those of every sequence hold its tokens, whatever was forked or
// forgotten, and whatever step failed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "sequences.h"

namespace {

using mlcpipe::kPage;
using mlcpipe::Sequence;

constexpr int64_t kPages = 12, kMostSlots = 8;
int32_t written[kPages][kPage];
uint64_t states[kMostSlots];  // a digest of all tokens

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

uint64_t Digest(const std::vector<int32_t>& tokens, int64_t length) {
  uint64_t digest = 1;
  for (int64_t at = 0; at < length; ++at) digest = (digest ^ static_cast<uint64_t>(tokens[static_cast<size_t>(at)])) * 31 + 1;
  return digest;
}

void CheckSlot(const Sequence& one, int64_t length, int32_t slot) {
  Check(slot >= 0 && slot < kMostSlots, "no such slot");
  Check(states[slot] == Digest(one.tokens, length), "another state");
}

void CheckAll(const mlcpipe::Sequences& sequences, bool slots) {
  for (const Sequence& one : sequences.all()) {
    Check(static_cast<int64_t>(one.pages.size()) >= mlcpipe::PagesOf(one.length), "pages are missing");
    for (int64_t at = 0; at < one.length; ++at) {
      const int32_t page = one.pages[static_cast<size_t>(at / kPage)];
      Check(page >= 0 && page < kPages, "no such page");
      Check(written[page][at % kPage] == one.tokens[static_cast<size_t>(at)], "another sequence's token");
    }
    if (slots && one.length) CheckSlot(one, one.length, one.slot);
    for (const mlcpipe::Checkpoint& kept : one.checkpoints) CheckSlot(one, kept.length, kept.slot);
    Check(one.checkpoints.size() <= 3 && (slots || one.slot < 0), "too many slots");
  }
}

// What a forward does, of tokens that are there; or half of it.
void Compute(mlcpipe::Sequences* sequences, int64_t count, bool fails) {
  const auto [read, write] = sequences->BeginStep();
  const Sequence& now = sequences->current();
  Check(read < 0 || states[read] == Digest(now.tokens, now.length), "another state is read");
  if (write >= 0) states[write] = fails ? 0 : Digest(now.tokens, now.length + count);
  if (fails) return sequences->FailStep();
  for (int64_t at = now.length; at < now.length + count; ++at) {
    written[now.pages[static_cast<size_t>(at / kPage)]][at % kPage] = now.tokens[static_cast<size_t>(at)];
  }
  sequences->EndStep(count);
}

}  // namespace

// STEPS SEED SLOTS: prints how many tokens of prompts were found and the most sequences that there were.
int main(int, char** arguments) {
  std::mt19937 draw(static_cast<uint32_t>(std::atoi(arguments[2])));
  const int slots = std::atoi(arguments[3]);
  mlcpipe::Sequences sequences(kPages, slots);
  int64_t found = 0;
  size_t most = 0;
  for (int step = 0; step < std::atoi(arguments[1]); ++step) {
    // A prompt of three letters that begins like a sequence, or not.
    std::vector<int32_t> tokens;
    if (draw() % 4) {
      auto like = sequences.all().begin();
      std::advance(like, draw() % sequences.all().size());
      tokens.assign(like->tokens.begin(), like->tokens.begin() + draw() % (like->length + 1));
    }
    while (tokens.empty() || draw() % 12) tokens.push_back(static_cast<int32_t>(draw() % 3));
    tokens.resize(std::min<size_t>(tokens.size(), kPages * kPage));
    const auto count = static_cast<int64_t>(tokens.size());
    const Sequence* nearest = nullptr;
    int64_t length = 0;
    for (const Sequence& one : sequences.all()) {
      const auto begin = one.tokens.begin();
      const int64_t same = std::mismatch(begin, begin + std::min(one.length, count - 1), tokens.begin()).first - begin;
      const int64_t usable = sequences.Usable(one, same);
      Check(usable == 0 || (usable >= one.shortest && usable <= same), "more than is there");
      if (usable > length) nearest = &one, length = usable;
    }
    if (nearest) {
      const auto [from, to] = sequences.Fork(*nearest, length);
      if (from != to) std::copy_n(written[from], kPage, written[to]);
    } else {
      sequences.Start();
    }
    found += length;
    Sequence& now = sequences.current();
    Check(now.length == length, "another length");
    sequences.Reserve(count);
    now.tokens = tokens;
    sequences.Keep();
    const int64_t border = (count - 1) / kPage * kPage;
    if (border > length) {
      Compute(&sequences, border - length, false);
      sequences.Keep();
    }
    const bool fails = draw() % 10 == 0;
    Compute(&sequences, count - now.length, fails);
    if (now.length == count) sequences.Keep();
    CheckAll(sequences, slots != 0);
    if (draw() % 20 == 0) now.shortest = draw() % (now.length + 1);  // as of a restored chat
    while (now.length >= count && now.length < kPages * kPage && draw() % 16) {  // the answer
      now.tokens.push_back(static_cast<int32_t>(draw() % 3));
      sequences.Reserve(now.length + 1);
      Compute(&sequences, 1, false);
    }
    CheckAll(sequences, slots != 0);
    most = std::max(most, sequences.all().size());
    if (draw() % 500 == 0) sequences.Clear();
    if (draw() % 50 == 0) now.length = 0;  // not finite
  }
  sequences.Clear();
  Check(sequences.free_pages().size() == kPages && sequences.free_slots().size() == static_cast<size_t>(slots), "units are lost");
  std::printf("%lld %zu\n", static_cast<long long>(found), most);
  return 0;
}
