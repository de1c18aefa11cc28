// Which tokens the pages of the KV cache hold: several sequences, which share whole pages of what they begin with.
#ifndef MLCPIPE_RUNTIME_SEQUENCES_H_
#define MLCPIPE_RUNTIME_SEQUENCES_H_

#include <cstdint>
#include <list>
#include <vector>

namespace mlcpipe {

constexpr int64_t kPage = 16;  // tokens of a page (tir_schedules/step_layout.py)

constexpr int64_t PagesOf(int64_t tokens) { return (tokens + kPage - 1) / kPage; }

struct Sequence {
  std::vector<int32_t> tokens;  // computed ones first; the rest may be of before
  std::vector<int32_t> pages;   // for `length` tokens or more
  int64_t length = 0;           // tokens that are computed
  int64_t prompt_length = 0;    // tokens that were computed as a prompt's
  int64_t rope = 0;             // the length that RoPE's frequencies follow, 0: none
};

class Sequences {
 public:
  // What the pages of a fork lack: the tokens of a page that is not whole, to be copied.
  struct Copy {
    int32_t from = 0, to = 0;
  };

  explicit Sequences(int64_t pages);

  // Last used first; there is always one.
  const std::list<Sequence>& all() const { return all_; }
  // Pages that no sequence has.
  const std::vector<int32_t>& free() const { return free_; }
  Sequence& current() { return all_.front(); }
  const Sequence& current() const { return all_.front(); }

  // Makes an empty sequence the current one.
  Sequence& Start();

  // Makes current what has the first `length` tokens of `of`, 1 or more: itself where it has no others, else a new one;
  // or itself without the others where there is no page for a copy.
  Copy Fork(const Sequence& of, int64_t length);

  // Gives the current sequence pages for so many tokens, at most what all pages hold. Those that were not used for
  // longest are forgotten for it.
  void Reserve(int64_t tokens);

  void Clear();

 private:
  std::list<Sequence> all_{1};
  std::vector<int32_t> free_;
  std::vector<int32_t> users_;  // of each page

  void Release(Sequence* from, int64_t kept_pages);
  void ForgetLast();
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_SEQUENCES_H_
