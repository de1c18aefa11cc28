// Random prompts and answers over few pages: every sequence's pages hold its tokens, whatever was forked or forgotten.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "sequences.h"

namespace {

using mlcpipe::kPage;
using mlcpipe::Sequence;

constexpr int64_t kPages = 12;
int32_t written[kPages][kPage];

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void CheckAll(const mlcpipe::Sequences& sequences) {
  for (const Sequence& one : sequences.all()) {
    Check(static_cast<int64_t>(one.pages.size()) >= mlcpipe::PagesOf(one.length), "pages are missing");
    for (int64_t at = 0; at < one.length; ++at) {
      const int32_t page = one.pages[static_cast<size_t>(at / kPage)];
      Check(page >= 0 && page < kPages, "no such page");
      Check(written[page][at % kPage] == one.tokens[static_cast<size_t>(at)], "another sequence's token");
    }
  }
}

// What a forward does.
void Compute(Sequence* now, int64_t count) {
  for (; count; --count, ++now->length) {
    written[now->pages[static_cast<size_t>(now->length / kPage)]][now->length % kPage] =
        now->tokens[static_cast<size_t>(now->length)];
  }
}

}  // namespace

// STEPS SEED: prints how many tokens of prompts were found and the most sequences that there were.
int main(int, char** arguments) {
  std::mt19937 draw(static_cast<uint32_t>(std::atoi(arguments[2])));
  mlcpipe::Sequences sequences(kPages);
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
      if (same > length) nearest = &one, length = same;
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
    Compute(&now, draw() % 10 ? count - length : draw() % (count - length));  // the rest was cancelled
    CheckAll(sequences);
    while (now.length >= count && now.length < kPages * kPage && draw() % 16) {  // the answer
      now.tokens.push_back(static_cast<int32_t>(draw() % 3));
      sequences.Reserve(now.length + 1);
      Compute(&now, 1);
    }
    CheckAll(sequences);
    most = std::max(most, sequences.all().size());
    if (draw() % 500 == 0) sequences.Clear();
    if (draw() % 50 == 0) now.length = 0;  // not finite
  }
  std::printf("%lld %zu\n", static_cast<long long>(found), most);
  return 0;
}
