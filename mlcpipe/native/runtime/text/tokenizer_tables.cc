#include "tokenizer_tables.h"

#include <algorithm>

#include "utf8.h"

namespace mlcpipe {

namespace {

constexpr uint32_t kTokenizerVersion = 2, kMaxProbes = 128, kMaxSteps = 64;

// Sections, in the order of `tokenizer_program`.
struct At {
  enum : uint32_t {
    kSettings, kFlags, kPieceEnds, kPieces, kFirstEnds, kFirst, kWordSlots, kWordEnds, kWords, kMerges, kChars,
    kBytes, kRaw, kRawEnds, kRawTexts, kNormalized, kNormalizedEnds, kNormalizedTexts, kNormalizer, kPreTokenizer,
    kStringEnds, kStrings, kCode, kStarts, kPageIndex, kPages, kFormCodes, kFormEnds, kFormTexts, kFormClasses,
    kCompositions, kAround, kControlIds, kControlEnds, kControlTexts, kControlNormalized, kEdges, kCount,
  };
};

uint32_t Mixed(uint32_t hash, uint32_t number) {
  hash = (hash ^ number) * 0x9E3779B1u;
  return hash ^ hash >> 15;
}

uint32_t HashOf(std::string_view text) {
  uint32_t hash = 2166136261u;
  for (char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 16777619u;
  return hash ^ hash >> 15;
}

// The slot in which `is` finds its entry, or null; slots are a power of two.
template <typename T, typename Empty, typename Is>
const T* Find(View<T> slots, uint32_t hash, Empty empty, Is is) {
  for (uint32_t probe = 0; probe < kMaxProbes; ++probe) {
    const T& slot = slots[(hash + probe) & (slots.size - 1)];
    if (empty(slot)) return nullptr;
    if (is(slot)) return &slot;
  }
  return nullptr;
}

template <typename T>
View<T> Slots(const Tables& tables, uint32_t section) {
  View<T> slots = tables.array<T>(section);
  if (slots.size == 0 || slots.size & (slots.size - 1)) throw tables.Broken("a hash table of a power of two");
  return slots;
}

AddedTokens Added(const Tables& tables, uint32_t section) {
  AddedTokens added{tables.array<AddedToken>(section), tables.ends(section + 1, section + 2),
                    tables.array<char>(section + 2), {}};
  for (size_t i = 0; i < added.ends.size; ++i) {
    std::string_view text = added.TextOf(i);
    if (!text.empty()) added.may_begin[static_cast<uint8_t>(text[0])] = true;
  }
  return added;
}

}  // namespace

TokenizerTables::TokenizerTables(const void* data, size_t size)
    : tables_(data, size, "mlctoken", kTokenizerVersion, At::kCount, Code::kTokenizer),
      word_slots_(Slots<uint32_t>(tables_, At::kWordSlots)),
      word_ends_(tables_.ends(At::kWordEnds, At::kWords)),
      word_text_(tables_.array<char>(At::kWords)),
      merges_(Slots<MergeSlot>(tables_, At::kMerges)),
      chars_(Slots<CharSlot>(tables_, At::kChars)),
      flags(tables_.array<uint8_t>(At::kFlags)),
      piece_ends(tables_.ends(At::kPieceEnds, At::kPieces)),
      first_ends(tables_.ends(At::kFirstEnds, At::kFirst)),
      piece_text(tables_.array<char>(At::kPieces)),
      first_text(tables_.array<char>(At::kFirst)),
      bytes(tables_.array<uint32_t>(At::kBytes)),
      raw(Added(tables_, At::kRaw)),
      normalized(Added(tables_, At::kNormalized)),
      normalizer(tables_.array<Step>(At::kNormalizer)),
      pre_tokenizer(tables_.array<Step>(At::kPreTokenizer)),
      string_ends(tables_.ends(At::kStringEnds, At::kStrings)),
      strings(tables_.array<char>(At::kStrings)),
      patterns(tables_.array<Instruction>(At::kCode), tables_.array<uint32_t>(At::kStarts),
               CharClasses(tables_.array<uint16_t>(At::kPageIndex), tables_.array<uint32_t>(At::kPages), tables_),
               tables_),
      form{tables_.array<uint32_t>(At::kFormCodes), tables_.ends(At::kFormEnds, At::kFormTexts),
           tables_.array<char>(At::kFormTexts), tables_.array<CombiningClass>(At::kFormClasses),
           tables_.array<Composition>(At::kCompositions)},
      around(tables_.array<uint32_t>(At::kAround)),
      control(tables_.array<uint32_t>(At::kControlIds)),
      control_ends(tables_.ends(At::kControlEnds, At::kControlTexts)),
      control_text(tables_.array<char>(At::kControlTexts)),
      control_normalized(tables_.array<uint8_t>(At::kControlNormalized)),
      edges(tables_.array<uint32_t>(At::kEdges)) {
  View<uint32_t> numbers = tables_.array<uint32_t>(At::kSettings);
  if (numbers.size * sizeof(uint32_t) != sizeof settings) throw tables_.Broken("settings of this version");
  std::memcpy(&settings, numbers.data, sizeof settings);
  CheckTokens();
  CheckSlots();
  CheckAdded(raw);
  CheckAdded(normalized);
  CheckSteps();
  CheckNormalForm();
}

void TokenizerTables::CheckTokens() const {
  const Settings& s = settings;
  if (s.tokens == 0 || flags.size != s.tokens || piece_ends.size != s.tokens || bytes.size != 256 ||
      (s.drops_first && first_ends.size != s.tokens) || (word_ends_.size && word_ends_.size != s.tokens)) {
    throw tables_.Broken("an entry for each token");
  }
  auto known = [&](uint32_t id) { return id < s.tokens || id == kNone; };
  bool good = known(s.unknown) && s.ids_before <= around.size;
  for (uint32_t id : bytes) good = good && known(id);
  for (View<uint32_t> ids : {around, control}) {
    for (uint32_t id : ids) good = good && id < s.tokens;
  }
  if (!good) throw tables_.Broken("tokens that are there");
  if (control_ends.size != control.size || control_normalized.size != control.size ||
      !std::is_sorted(edges.begin(), edges.end())) {
    throw tables_.Broken("whole control tokens");
  }
  for (size_t i = 0; i < control.size; ++i) {
    std::string_view text = StringAt(control_ends, control_text, i);
    if (text.empty() || utf8::ValidPrefix(text) != text.size()) throw tables_.Broken("control tokens of UTF-8");
  }
  if (s.strip_char != kNone && !utf8::IsScalar(s.strip_char)) throw tables_.Broken("a character to strip");
  if (std::max({s.joined_class, s.space_class, s.word_class}) >= patterns.classes.size()) {
    throw tables_.Broken("classes of spaces and words");
  }
}

void TokenizerTables::CheckSlots() const {
  bool good = true;
  uint32_t tokens = settings.tokens;
  for (uint32_t id : word_slots_) good &= id < tokens || id == kNone;
  for (const MergeSlot& slot : merges_) {
    good &= slot.left == kNone || (slot.left < tokens && slot.right < tokens && slot.merged < tokens);
  }
  for (const CharSlot& slot : chars_) good &= slot.code == kNone || slot.id < tokens;
  if (!good) throw tables_.Broken("words and merges of tokens that are there");
}

void TokenizerTables::CheckAdded(const AddedTokens& added) const {
  if (added.tokens.size != added.ends.size) throw tables_.Broken("whole added tokens");
  std::string_view last;
  for (size_t i = 0; i < added.tokens.size; ++i) {
    std::string_view text = added.TextOf(i);
    if (added.tokens[i].id >= settings.tokens || text.empty() || text < last ||
        utf8::ValidPrefix(text) != text.size()) {
      throw tables_.Broken("added tokens in order");
    }
    last = text;
  }
}

void TokenizerTables::CheckSteps() const {
  if (normalizer.size > kMaxSteps || pre_tokenizer.size > kMaxSteps) throw tables_.Broken("fewer steps");
  for (size_t i = 0; i < string_ends.size; ++i) {
    std::string_view text = StringAt(string_ends, strings, i);
    if (utf8::ValidPrefix(text) != text.size()) throw tables_.Broken("strings of UTF-8");
  }
  for (const Step& step : normalizer) {
    bool good = step.kind == Step::kPrepend ? step.a < string_ends.size
                : step.kind == Step::kReplace ? step.a < patterns.size() && step.b < string_ends.size
                                              : step.kind == Step::kNormalForm && step.b < patterns.classes.size();
    if (!good) throw tables_.Broken("steps of the normalizer");
  }
  for (const Step& step : pre_tokenizer) {
    bool good = step.kind == Step::kSplit ? step.a < patterns.size() && step.b < Step::kBehaviors
                : step.kind == Step::kMetaspace ? utf8::IsScalar(step.a) && step.b < Step::kSchemes
                                                : step.kind < Step::kPreTokenizers;
    if (!good) throw tables_.Broken("steps of the pre-tokenizer");
  }
}

void TokenizerTables::CheckNormalForm() const {
  bool good = form.codes.size == form.ends.size && std::is_sorted(form.codes.begin(), form.codes.end());
  for (size_t i = 0; good && i < form.codes.size; ++i) {
    std::string_view text = StringAt(form.ends, form.text, i);
    good = utf8::ValidPrefix(text) == text.size();
  }
  for (size_t i = 0; good && i < form.classes.size; ++i) {
    good = form.classes[i].number < 256 && (i == 0 || form.classes[i - 1].code < form.classes[i].code);
  }
  for (size_t i = 0; good && i < form.compositions.size; ++i) good = utf8::IsScalar(form.compositions[i].composed);
  if (!good) throw tables_.Broken("a normal form in order");
}

const MergeSlot* TokenizerTables::FindMerge(uint32_t left, uint32_t right) const {
  return Find(
      merges_, Mixed(Mixed(0, left), right), [](const MergeSlot& slot) { return slot.left == kNone; },
      [&](const MergeSlot& slot) { return slot.left == left && slot.right == right; });
}

uint32_t TokenizerTables::FindWord(std::string_view word) const {
  auto is = [&](uint32_t id) {
    return (word_ends_.size ? StringAt(word_ends_, word_text_, id) : StringAt(piece_ends, piece_text, id)) == word;
  };
  const uint32_t* slot = Find(word_slots_, HashOf(word), [](uint32_t id) { return id == kNone; }, is);
  return slot ? *slot : kNone;
}

uint32_t TokenizerTables::FindChar(uint32_t code) const {
  const CharSlot* slot = Find(
      chars_, Mixed(0, code), [](const CharSlot& slot) { return slot.code == kNone; },
      [&](const CharSlot& slot) { return slot.code == code; });
  return slot ? slot->id : kNone;
}

size_t AddedTokens::LongestAt(std::string_view where, size_t at) const {
  size_t low = 0, high = tokens.size, best = tokens.size;
  for (size_t length = 0;; ++length) {
    while (low < high && TextOf(low).size() == length) best = low++;
    if (low == high || at + length == where.size()) return best;
    auto byte = [&](size_t i) { return static_cast<uint8_t>(TextOf(i)[length]); };
    auto wanted = static_cast<uint8_t>(where[at + length]);
    size_t first = low, end = high;
    while (first < end) {
      size_t middle = (first + end) / 2;
      if (byte(middle) < wanted) first = middle + 1;
      else end = middle;
    }
    low = first;
    end = high;
    while (first < end) {
      size_t middle = (first + end) / 2;
      if (byte(middle) <= wanted) first = middle + 1;
      else end = middle;
    }
    high = first;
  }
}

}  // namespace mlcpipe
