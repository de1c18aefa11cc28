#include "pattern.h"

#include "utf8.h"

namespace mlcpipe {

namespace {

Error TooLong() {
  return Error(Code::kTokenizer, "the text takes too long to cut into words").Next("leave out what repeats in it");
}

bool AtEdge(uint32_t op, std::string_view text, size_t place) {
  switch (op) {
    case Instruction::kLineBegin:
      return place == 0 || (place < text.size() && text[place - 1] == '\n');
    case Instruction::kLineEnd:
      return place == text.size() || text[place] == '\n';
    case Instruction::kBegin:
      return place == 0;
    default:
      return place == text.size();
  }
}

}  // namespace

CharClasses::CharClasses(View<uint16_t> index, View<uint32_t> pages, const Tables& broken)
    : index_(index), pages_(pages), size_(static_cast<uint32_t>(index.size / kPages)) {
  if (index.size % kPages || pages.size % kWords) throw broken.Broken("whole classes of code points");
  for (uint16_t page : index) {
    if (page >= pages.size / kWords) throw broken.Broken("pages of classes that are there");
  }
}

Patterns::Patterns(View<Instruction> code, View<uint32_t> starts, CharClasses classes, const Tables& broken)
    : code(code), starts(starts), classes(classes) {
  if (starts.size % kStarts) throw broken.Broken("whole patterns");
  for (uint32_t start : starts) {
    if (start >= code.size) throw broken.Broken("patterns that begin inside the program");
  }
  for (size_t i = 0; i < code.size; ++i) {
    const Instruction& one = code[i];
    bool ends = one.op == Instruction::kMatch || one.op == Instruction::kFail || one.op == Instruction::kJump ||
                one.op == Instruction::kSplit;
    bool jumps = one.op >= Instruction::kSplit && one.op <= Instruction::kAtomic;
    bool reads = one.op >= Instruction::kClass && one.op <= Instruction::kPossessive;
    if (one.op >= Instruction::kCount || (!ends && i + 1 == code.size) || (jumps && one.a >= code.size) ||
        (one.op == Instruction::kSplit && one.b >= code.size) || (reads && one.a >= classes.size())) {
      throw broken.Broken("an instruction that stays inside the program at " + std::to_string(i));
    }
  }
}

bool Matcher::Find(uint32_t pattern, std::string_view text, size_t from, size_t* begin, size_t* end) {
  const uint32_t* starts = &patterns_.starts[size_t{pattern} * Patterns::kStarts];
  for (size_t place = from; place < text.size();) {
    uint32_t at = starts[static_cast<uint8_t>(text[place])];
    if (patterns_.code[at].op != Instruction::kFail && Run(at, text, place, end, 0)) {
      if (*end <= place) throw Error(Code::kTokenizer, "a damaged pattern").Expected("matches of some character");
      *begin = place;
      return true;
    }
    Spend(1);
    utf8::Next(text, &place);
  }
  return false;
}

void Matcher::Spend(uint64_t steps) {
  if (steps_ < steps) throw TooLong();
  steps_ -= steps;
}

void Matcher::Push(Frame frame) {
  if (frames_.size() >= kFrames) throw TooLong();
  frames_.push_back(frame);
}

// Takes characters of a class; false where they are too few.
bool Matcher::Repeat(uint32_t at, std::string_view text, size_t* place) {
  const Instruction& one = patterns_.code[at];
  size_t first = *place;
  uint32_t most = one.op == Instruction::kLazy ? one.b : one.c;
  uint32_t count = 0;
  for (; count < most && *place < text.size(); ++count) {
    size_t next = *place;
    if (!patterns_.classes.Has(one.a, utf8::Next(text, &next))) break;
    *place = next;
    if (count + 1 == one.b) first = next;
  }
  Spend(count / 8);
  if (count < one.b) return false;
  if (one.op == Instruction::kLazy && one.c > count) Push({Frame::kLonger, at, *place, one.c - count});
  if (one.op == Instruction::kGreedy && *place > first) Push({Frame::kShorter, at + 1, *place, first});
  return true;
}

// Goes back to the latest place with another way; false where there is none.
bool Matcher::Back(std::string_view text, size_t base, uint32_t* at, size_t* place) {
  while (frames_.size() > base) {
    Frame& frame = frames_.back();
    if (frame.kind == Frame::kShorter) {
      *at = frame.at;
      *place = frame.place = utf8::Before(text, frame.place);
      if (*place <= frame.bound) frames_.pop_back();
      return true;
    }
    if (frame.kind == Frame::kPlace) {
      *at = frame.at;
      *place = frame.place;
      frames_.pop_back();
      return true;
    }
    size_t next = frame.place;
    if (next == text.size() || !patterns_.classes.Has(patterns_.code[frame.at].a, utf8::Next(text, &next))) {
      frames_.pop_back();
      continue;
    }
    *at = frame.at + 1;
    *place = frame.place = next;
    if (--frame.bound == 0) frames_.pop_back();
    return true;
  }
  return false;
}

bool Matcher::Run(uint32_t at, std::string_view text, size_t place, size_t* end, int depth) {
  if (depth > kDepth) throw TooLong();
  const size_t base = frames_.size();
  for (;;) {
    Spend(1);
    const Instruction& one = patterns_.code[at];
    bool goes_on = true;
    switch (one.op) {
      case Instruction::kMatch:
        frames_.resize(base);
        *end = place;
        return true;
      case Instruction::kChar:
        goes_on = place < text.size() && utf8::Next(text, &place) == one.a;
        ++at;
        break;
      case Instruction::kClass:
        goes_on = place < text.size() && patterns_.classes.Has(one.a, utf8::Next(text, &place));
        ++at;
        break;
      case Instruction::kGreedy:
      case Instruction::kLazy:
      case Instruction::kPossessive:
        goes_on = Repeat(at++, text, &place);
        break;
      case Instruction::kSplit:
        Push({Frame::kPlace, one.b, place, 0});
        at = one.a;
        break;
      case Instruction::kJump:
        at = one.a;
        break;
      case Instruction::kLook:
      case Instruction::kLookNot: {
        size_t ignored;
        goes_on = Run(at + 1, text, place, &ignored, depth + 1) == (one.op == Instruction::kLook);
        at = one.a;
        break;
      }
      case Instruction::kAtomic:
        goes_on = Run(at + 1, text, place, &place, depth + 1);
        at = one.a;
        break;
      case Instruction::kFail:
        goes_on = false;
        break;
      default:
        goes_on = AtEdge(one.op, text, place);
        ++at;
    }
    if (!goes_on && !Back(text, base, &at, &place)) return false;
  }
}

}  // namespace mlcpipe
