#include "tokenizer_encoder.h"

#include <algorithm>

#include "utf8.h"

namespace mlcpipe {

namespace {

using Cuts = std::vector<std::pair<size_t, size_t>>;

// GPT-2's characters for bytes: printable ones of Latin-1 stand for themselves, the others begin at U+0100.
uint32_t CharOf(uint8_t byte) {
  if ((byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD)) return byte;
  if (byte <= 0x20) return 0x100 + byte;
  return byte == 0xAD ? 0x143 : 0x100 + 33 + byte - 0x7F;
}

}  // namespace

Encoding Encoder::Encode(bool plain) {
  Part whole{text_, nullptr, 0, true};
  made_ = {};
  CutAtAdded(
      tables_.raw, whole, plain,
      [&](uint32_t id, size_t begin, size_t end) { Add(id, whole, begin, end); },
      [&](const Part& part) { Unchanged(part, plain); });
  return std::move(made_);
}

// Calls `token` and `rest` in the order of the text, as AddedVocabulary of `tokenizers` cuts it.
template <typename Token, typename Rest>
void Encoder::CutAtAdded(const AddedTokens& added, const Part& part, bool plain, Token token, Rest rest) {
  std::string_view text = part.text;
  const CharClasses& classes = tables_.patterns.classes;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    size_t found = added.may_begin[static_cast<uint8_t>(text[at])] ? added.LongestAt(text, at) : added.tokens.size;
    if (found == added.tokens.size) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + added.TextOf(found).size();
    at = end;
    AddedToken one = added.tokens[found];
    if (plain && one.flags & AddedToken::kSteers) continue;
    if (one.flags & AddedToken::kSingleWord && !StandsAlone(text, begin, end)) continue;
    if (one.flags & AddedToken::kLStrip) {
      while (begin > done) {
        size_t before = utf8::Before(text, begin), next = before;
        if (!classes.Has(tables_.settings.space_class, utf8::Next(text, &next))) break;
        begin = before;
      }
      begin = std::max(begin, done);
    }
    for (size_t next = end; one.flags & AddedToken::kRStrip && end < text.size(); end = next) {
      if (!classes.Has(tables_.settings.space_class, utf8::Next(text, &next))) break;
    }
    if (done < begin) rest(part.Sub(done, begin));
    token(one.id, begin, end);
    done = end;
  }
  if (done < text.size()) rest(part.Sub(done, text.size()));
}

// Whether no character of a word is beside these bytes.
bool Encoder::StandsAlone(std::string_view text, size_t begin, size_t end) const {
  auto is_word = [&](size_t at) {
    return tables_.patterns.classes.Has(tables_.settings.word_class, utf8::Next(text, &at));
  };
  return (begin == 0 || !is_word(utf8::Before(text, begin))) && (end == text.size() || !is_word(end));
}

void Encoder::Unchanged(const Part& part, bool plain) {
  ChangingText changed;
  Part normalized = part;
  if (tables_.normalizer.size) {
    changed = Copy(part);
    Normalize(tables_, &matcher_, &changed);
    normalized.text = changed.text;
    normalized.origins = with_spans_ ? changed.origins.data() : nullptr;
  }
  CutAtAdded(
      tables_.normalized, normalized, plain,
      [&](uint32_t id, size_t begin, size_t end) { Add(id, normalized, begin, end); },
      [&](const Part& rest) { PreTokenize(0, rest); });
}

ChangingText Encoder::Copy(const Part& part) const {
  ChangingText copy;
  copy.text = part.text;
  copy.has_origins = with_spans_;
  for (uint32_t i = 0; with_spans_ && i < part.text.size(); ++i) {
    copy.origins.push_back(part.origins ? part.origins[i] : TextSpan{part.offset + i, part.offset + i + 1});
  }
  return copy;
}

void Encoder::PreTokenize(size_t step, const Part& part) {
  if (part.text.empty()) return;
  if (step == tables_.pre_tokenizer.size) {
    Word(part);
  } else if (tables_.pre_tokenizer[step].kind == Step::kSplit) {
    Split(step, part);
  } else {
    Change(step, part);
  }
}

void Encoder::Split(size_t step, const Part& part) {
  const Step& split = tables_.pre_tokenizer[step];
  std::vector<Cut> cuts;
  const bool isolated = split.b == Step::kIsolated;
  auto add = [&](size_t begin, size_t end, bool matches) {
    if (begin == end) return;
    matches ^= split.c != 0;
    if (isolated) return PreTokenize(step + 1, part.Sub(begin, end));
    Cut* last = cuts.empty() ? nullptr : &cuts.back();
    bool joins = last && ((split.b == Step::kContiguous && last->matches == matches) ||
                          (split.b == Step::kMergedWithPrevious && matches && !last->matches) ||
                          (split.b == Step::kMergedWithNext && !matches && last->matches));
    if (joins) {
      last->end = end;
      last->matches = matches;
    } else if (split.b != Step::kRemoved || !matches) {
      cuts.push_back({begin, end, matches});
    }
  };
  size_t done = 0, begin, end;
  while (matcher_.Find(split.a, part.text, done, &begin, &end)) {
    add(done, begin, false);
    add(begin, end, true);
    done = end;
  }
  add(done, part.text.size(), false);
  for (const Cut& cut : cuts) PreTokenize(step + 1, part.Sub(cut.begin, cut.end));
}

void Encoder::Change(size_t step, const Part& part) {
  const Step& change = tables_.pre_tokenizer[step];
  std::string prefix;
  if (change.kind == Step::kPrefixSpace) {
    if (part.text[0] == ' ') return PreTokenize(step + 1, part);
    prefix = " ";
  }
  ChangingText text = change.kind == Step::kPrefixSpace ? Copy(part) : ChangingText{};
  text.has_origins = with_spans_;
  if (change.kind == Step::kMetaspace) utf8::Append(&prefix, change.a);
  for (size_t at = 0; change.kind != Step::kPrefixSpace && at < part.text.size(); ++at) {
    std::string replaced(1, part.text[at]);
    if (change.kind == Step::kMetaspace && part.text[at] == ' ') {
      replaced = prefix;
    } else if (change.kind == Step::kBytesToChars) {
      replaced.clear();
      utf8::Append(&replaced, CharOf(static_cast<uint8_t>(part.text[at])));
    }
    auto place = static_cast<uint32_t>(part.offset + at);
    text.Append(replaced, part.origins ? part.origins[at] : TextSpan{place, place + 1});
  }
  bool wanted = change.kind == Step::kPrefixSpace ||
                (change.kind == Step::kMetaspace && text.text.compare(0, prefix.size(), prefix) != 0 &&
                 (change.b == Step::kAlways || (change.b == Step::kFirst && part.first)));
  if (wanted) text.Prepend(prefix);
  PreTokenize(step + 1, {text.text, with_spans_ ? text.origins.data() : nullptr, part.offset, part.first});
}

void Encoder::Word(const Part& part) {
  const uint32_t start = tables_.settings.word_start, joined = tables_.settings.joined_class;
  for (size_t begin = 0; begin < part.text.size();) {
    size_t end = part.text.size();
    if (start != kNone) {
      size_t next = begin;
      uint32_t last = utf8::Next(part.text, &next);
      for (end = next; end < part.text.size(); end = next) {
        uint32_t code = utf8::Next(part.text, &next);
        if (code == start && !tables_.patterns.classes.Has(joined, last)) break;
        last = code;
      }
    }
    size_t at = begin;
    for (const Merger::Symbol& symbol : merger_.Encode(part.text.substr(begin, end - begin))) {
      Add(symbol.id, part, at, at + symbol.bytes);
      at += symbol.bytes;
    }
    begin = end;
  }
}

void Encoder::Add(uint32_t id, const Part& part, size_t begin, size_t end) {
  made_.ids.push_back(id);
  if (!with_spans_) return;
  if (part.origins) {
    made_.spans.push_back({part.origins[begin].begin, part.origins[end - 1].end});
  } else {
    made_.spans.push_back({static_cast<uint32_t>(part.offset + begin), static_cast<uint32_t>(part.offset + end)});
  }
}

}  // namespace mlcpipe
