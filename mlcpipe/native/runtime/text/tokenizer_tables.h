// The tables of a tokenizer, as mlcpipe/compiler/text/tokenizer_program.py writes them, checked.
#ifndef MLCPIPE_RUNTIME_TEXT_TOKENIZER_TABLES_H_
#define MLCPIPE_RUNTIME_TEXT_TOKENIZER_TABLES_H_

#include <array>
#include <cstdint>
#include <string_view>

#include "../tables.h"
#include "pattern.h"

namespace mlcpipe {

constexpr uint32_t kNone = 0xFFFFFFFF;

// A step of the normalizer or of the pre-tokenizer.
struct Step {
  enum Normalizer : uint32_t { kPrepend, kReplace, kNormalForm, kNormalizers };
  enum PreTokenizer : uint32_t { kSplit, kMetaspace, kPrefixSpace, kBytesToChars, kPreTokenizers };
  enum Behavior : uint32_t { kIsolated, kRemoved, kContiguous, kMergedWithPrevious, kMergedWithNext, kBehaviors };
  enum Scheme : uint32_t { kNever, kFirst, kAlways, kSchemes };
  uint32_t kind, a, b, c;
};

struct AddedToken {
  enum Flag : uint32_t { kSingleWord = 1, kLStrip = 2, kRStrip = 4, kSteers = 8 };
  uint32_t id, flags;
};

// Added tokens, sorted by their texts.
struct AddedTokens {
  View<AddedToken> tokens;
  View<uint32_t> ends;
  View<char> text;
  std::array<bool, 256> may_begin{};  // with this byte

  std::string_view TextOf(size_t i) const { return StringAt(ends, text, i); }
  // The longest one that the text has at `at`, or the number of tokens.
  size_t LongestAt(std::string_view where, size_t at) const;
};

struct Composition {
  uint32_t first, second, composed;
};

struct CombiningClass {
  uint32_t code, number;
};

// Unicode's normal form of one kind; sorted by code points.
struct NormalFormTables {
  View<uint32_t> codes, ends;  // what decomposes
  View<char> text;             // into what
  View<CombiningClass> classes;
  View<Composition> compositions;
};

struct MergeSlot {
  uint32_t left, right, rank, merged;
};

struct CharSlot {
  uint32_t code, id;
};

class TokenizerTables {
 public:
  enum Flag : uint8_t { kKnown = 1, kSkipped = 2, kByte = 4, kControl = 8, kEnds = 16 };

  // Numbers in the order of `_settings` of tokenizer_program.py; kNone for none.
  struct Settings {
    uint32_t tokens, rows, most_chars, ids_before, byte_level, unknown, fuses_unknown, byte_fallback, word_start,
        trims_spaces, drops_first, strip_char, strip_count, spaced, plain_differs, joined_class, space_class,
        word_class;
  };

  // `data` must stay, and lie at a multiple of 8. Throws Error of Code::kTokenizer for anything that is damaged.
  TokenizerTables(const void* data, size_t bytes);

  // The token that two adjacent tokens merge to, or null.
  const MergeSlot* FindMerge(uint32_t left, uint32_t right) const;
  // The token of a whole word, or kNone.
  uint32_t FindWord(std::string_view word) const;
  uint32_t FindChar(uint32_t code) const;
  std::string_view Piece(uint32_t id, bool first) const {
    return first && settings.drops_first ? StringAt(first_ends, first_text, id) : StringAt(piece_ends, piece_text, id);
  }

 private:
  Tables tables_;
  View<uint32_t> word_slots_, word_ends_;
  View<char> word_text_;
  View<MergeSlot> merges_;
  View<CharSlot> chars_;

  void CheckTokens() const;
  void CheckSlots() const;
  void CheckAdded(const AddedTokens& added) const;
  void CheckSteps() const;
  void CheckNormalForm() const;

 public:
  Settings settings;
  View<uint8_t> flags;  // of each token
  View<uint32_t> piece_ends, first_ends;
  View<char> piece_text, first_text;
  View<uint32_t> bytes;  // the token of each byte, or kNone
  AddedTokens raw, normalized;
  View<Step> normalizer, pre_tokenizer;
  View<uint32_t> string_ends;
  View<char> strings;
  Patterns patterns;
  NormalFormTables form;
  View<uint32_t> around;  // ids before and after a text
  View<uint32_t> control, control_ends;
  View<char> control_text;
  View<uint8_t> control_normalized;  // whether it may be spelled otherwise
  View<uint32_t> edges;              // signs that begin and end control tokens, in order
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TEXT_TOKENIZER_TABLES_H_
