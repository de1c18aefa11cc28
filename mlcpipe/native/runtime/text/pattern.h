// A backtracking matcher of patterns that mlcpipe/compiler/text/pattern_program.py writes.
#ifndef MLCPIPE_RUNTIME_TEXT_PATTERN_H_
#define MLCPIPE_RUNTIME_TEXT_PATTERN_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "../tables.h"

namespace mlcpipe {

struct Instruction {
  enum Op : uint32_t {
    kMatch,
    kFail,
    kChar,        // the code point a
    kClass,       // one of the class a
    kGreedy,      // b to c of the class a, as many as possible at first
    kLazy,        // as few as possible at first
    kPossessive,  // as many as possible, and no fewer
    kSplit,       // tries a, then b
    kJump,        // to a
    kLook,        // continues at a if what follows matches, and takes nothing
    kLookNot,
    kAtomic,      // continues at a behind the first match of what follows
    kLineBegin,
    kLineEnd,
    kBegin,
    kEnd,
    kCount,
  };
  uint32_t op, a, b, c;
};

// Classes of code points: of each the pages of 256 code points, and pages as bits.
class CharClasses {
 public:
  CharClasses() = default;
  // Throws `broken.Broken` for pages that are not there.
  CharClasses(View<uint16_t> index, View<uint32_t> pages, const Tables& broken);

  uint32_t size() const { return size_; }
  bool Has(uint32_t number, uint32_t code) const {
    const uint32_t* page = pages_.data + kWords * index_[number * kPages + (code >> 8)];
    return page[code >> 5 & (kWords - 1)] >> (code & 31) & 1;
  }

 private:
  static constexpr uint32_t kPages = 0x110000 / 256, kWords = 256 / 32;

  View<uint16_t> index_;
  View<uint32_t> pages_;
  uint32_t size_ = 0;
};

// Patterns of one file, checked: an instruction reads no class and jumps to no place that is not there.
struct Patterns {
  static constexpr uint32_t kStarts = 256;  // of a pattern: where to begin for each first byte of a match

  Patterns() = default;
  Patterns(View<Instruction> code, View<uint32_t> starts, CharClasses classes, const Tables& broken);

  uint32_t size() const { return static_cast<uint32_t>(starts.size / kStarts); }

  View<Instruction> code;
  View<uint32_t> starts;
  CharClasses classes;
};

// Matches in one call's texts, within a number of steps. Not to be shared between threads.
class Matcher {
 public:
  Matcher(const Patterns& patterns, uint64_t bytes) : patterns_(patterns), steps_(kSteps + kStepsPerByte * bytes) {}

  // The first match from `from` on, which has at least one character. Throws Error when the steps are used up.
  bool Find(uint32_t pattern, std::string_view text, size_t from, size_t* begin, size_t* end);

 private:
  static constexpr uint64_t kSteps = 10'000'000, kStepsPerByte = 200;
  static constexpr size_t kFrames = 1 << 21;  // places to come back to
  static constexpr int kDepth = 16;           // of programs in programs

  struct Frame {
    enum Kind : uint32_t { kPlace, kShorter, kLonger } kind;
    uint32_t at;   // instruction
    size_t place;  // in the text
    size_t bound;  // kShorter: the first place; kLonger: how many more
  };

  bool Run(uint32_t at, std::string_view text, size_t place, size_t* end, int depth);
  bool Repeat(uint32_t at, std::string_view text, size_t* place);
  bool Back(std::string_view text, size_t base, uint32_t* at, size_t* place);
  void Push(Frame frame);
  void Spend(uint64_t steps);

  const Patterns& patterns_;
  uint64_t steps_;
  std::vector<Frame> frames_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_PATTERN_H_
