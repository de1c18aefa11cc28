#include "normalizer.h"

#include <algorithm>

#include "utf8.h"

namespace mlcpipe {

namespace {

// Hangul syllables are composed by arithmetic: The Unicode Standard, 3.12.
constexpr uint32_t kLeads = 0x1100, kVowels = 0x1161, kTails = 0x11A7, kSyllables = 0xAC00;
constexpr uint32_t kLeadCount = 19, kVowelCount = 21, kTailCount = 28;

struct Mark {
  uint32_t code, number;  // and its combining class
};

class NormalForm {
 public:
  NormalForm(const NormalFormTables& tables, bool composes) : tables_(tables), composes_(composes) {}

  std::string Of(std::string_view text) {
    chars_.clear();
    for (size_t at = 0; at < text.size();) Decompose(utf8::Next(text, &at));
    for (size_t i = 0; i < chars_.size(); ++i) {
      size_t begin = i;
      while (i < chars_.size() && chars_[i].number) ++i;
      std::stable_sort(chars_.begin() + begin, chars_.begin() + i,
                       [](const Mark& a, const Mark& b) { return a.number < b.number; });
    }
    if (composes_) Compose();
    std::string result;
    for (const Mark& mark : chars_) utf8::Append(&result, mark.code);
    return result;
  }

 private:
  void Decompose(uint32_t code) {
    if (code - kSyllables < kLeadCount * kVowelCount * kTailCount) {
      uint32_t index = code - kSyllables;
      Add(kLeads + index / (kVowelCount * kTailCount));
      Add(kVowels + index / kTailCount % kVowelCount);
      if (index % kTailCount) Add(kTails + index % kTailCount);
      return;
    }
    const uint32_t* found = std::lower_bound(tables_.codes.begin(), tables_.codes.end(), code);
    if (found == tables_.codes.end() || *found != code) {
      Add(code);
      return;
    }
    std::string_view text = StringAt(tables_.ends, tables_.text, found - tables_.codes.begin());
    for (size_t at = 0; at < text.size();) Add(utf8::Next(text, &at));
  }

  void Add(uint32_t code) {
    auto found = std::lower_bound(tables_.classes.begin(), tables_.classes.end(), code,
                                  [](const CombiningClass& one, uint32_t code) { return one.code < code; });
    bool is_mark = found != tables_.classes.end() && found->code == code;
    chars_.push_back({code, is_mark ? found->number : 0});
  }

  // Joins marks with the starter before them unless one between has the same class or a higher one.
  void Compose() {
    size_t starter = chars_.size(), kept = 0;
    uint32_t last = 0;  // the class of the one before, after the starter
    for (size_t i = 0; i < chars_.size(); ++i) {
      Mark mark = chars_[i];
      bool beside = starter < kept && starter + 1 == kept;
      if (starter < kept && (beside || last < mark.number)) {
        if (uint32_t composed = Composed(chars_[starter].code, mark.code)) {
          chars_[starter].code = composed;
          continue;
        }
      }
      if (mark.number == 0) starter = kept;
      last = mark.number;
      chars_[kept++] = mark;
    }
    chars_.resize(kept);
  }

  // One character for two, or 0.
  uint32_t Composed(uint32_t first, uint32_t second) const {
    if (first - kLeads < kLeadCount && second - kVowels < kVowelCount) {
      return kSyllables + ((first - kLeads) * kVowelCount + second - kVowels) * kTailCount;
    }
    uint32_t syllable = first - kSyllables;
    if (syllable < kLeadCount * kVowelCount * kTailCount && syllable % kTailCount == 0 && second > kTails &&
        second < kTails + kTailCount) {
      return first + second - kTails;
    }
    auto before = [](const Composition& one, std::pair<uint32_t, uint32_t> pair) {
      return std::make_pair(one.first, one.second) < pair;
    };
    auto found = std::lower_bound(tables_.compositions.begin(), tables_.compositions.end(),
                                  std::make_pair(first, second), before);
    bool is = found != tables_.compositions.end() && found->first == first && found->second == second;
    return is ? found->composed : 0;
  }

  const NormalFormTables& tables_;
  const bool composes_;
  std::vector<Mark> chars_;
};

// Builds a new text from parts of the old one.
class Rewriter {
 public:
  explicit Rewriter(ChangingText* text) : text_(text) { made_.has_origins = text->has_origins; }

  void Keep(size_t begin, size_t end) {
    made_.text.append(text_->text, begin, end - begin);
    if (made_.has_origins) {
      made_.origins.insert(made_.origins.end(), text_->origins.begin() + begin, text_->origins.begin() + end);
    }
  }

  // `part` in the place of the bytes from `begin` to `end`, of which there are some.
  void Put(std::string_view part, size_t begin, size_t end) {
    TextSpan origin{};
    if (made_.has_origins) origin = {text_->origins[begin].begin, text_->origins[end - 1].end};
    made_.Append(part, origin);
  }

  void Done() { std::swap(*text_, made_); }

 private:
  ChangingText* text_;
  ChangingText made_;
};

void Replace(const TokenizerTables& tables, const Step& step, Matcher* matcher, ChangingText* text) {
  std::string_view content = StringAt(tables.string_ends, tables.strings, step.b);
  Rewriter rewriter(text);
  size_t done = 0, begin, end;
  while (matcher->Find(step.a, text->text, done, &begin, &end)) {
    rewriter.Keep(done, begin);
    rewriter.Put(content, begin, end);
    done = end;
  }
  rewriter.Keep(done, text->text.size());
  rewriter.Done();
}

// An inert character and what is not inert behind it change apart from the rest.
void ToNormalForm(const TokenizerTables& tables, const Step& step, ChangingText* text) {
  const CharClasses& classes = tables.patterns.classes;
  std::string_view old = text->text;
  auto inert = [&](size_t* at) { return classes.Has(step.b, utf8::Next(old, at)); };
  bool stays = true;
  for (size_t at = 0; stays && at < old.size();) stays = inert(&at);
  if (stays) return;
  NormalForm form(tables.form, step.a != 0);
  Rewriter rewriter(text);
  size_t done = 0, last = 0;  // `last`: where the latest inert character begins
  for (size_t at = 0; at < old.size();) {
    size_t begin = at;
    if (inert(&at)) {
      last = begin;
      continue;
    }
    for (size_t next = at; at < old.size() && !inert(&next); at = next) continue;
    rewriter.Keep(done, last);
    rewriter.Put(form.Of(old.substr(last, at - last)), last, at);
    done = last = at;
  }
  rewriter.Keep(done, old.size());
  rewriter.Done();
}

}  // namespace

void ChangingText::Prepend(std::string_view begin) {
  if (has_origins) {
    TextSpan first = origins.empty() ? TextSpan{} : origins.front();
    origins.insert(origins.begin(), begin.size(), first);
  }
  text.insert(0, begin);
}

void ChangingText::Append(std::string_view part, TextSpan origin) {
  text += part;
  if (has_origins) origins.insert(origins.end(), part.size(), origin);
}

void Normalize(const TokenizerTables& tables, Matcher* matcher, ChangingText* text) {
  for (const Step& step : tables.normalizer) {
    if (step.kind == Step::kPrepend) {
      if (!text->text.empty()) text->Prepend(StringAt(tables.string_ends, tables.strings, step.a));
    } else if (step.kind == Step::kReplace) {
      Replace(tables, step, matcher, text);
    } else {
      ToNormalForm(tables, step, text);
    }
  }
}

}  // namespace mlcpipe
