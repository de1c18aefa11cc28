// Encodes a prompt whose template may write control tokens and whose messages may not, as
// mlcpipe/runtime/text/apart.py: it explains the rules.
#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "tokenizer.h"
#include "tokenizer_encoder.h"
#include "utf8.h"

namespace mlcpipe {

namespace {

constexpr uint32_t kStandIns = 0x1D800, kStandInsEnd = 0x1DA00;  // U+1D800 to U+1D9FF, as in contents.py

struct Found {
  size_t begin, end;
  size_t control;  // index of the token
};

class ApartEncoder {
 public:
  ApartEncoder(const TokenizerTables& tables, const std::vector<ChatPart>& parts) : tables_(tables) {
    for (const ChatPart& part : parts) text_ += part.text;
    size_t begin = 0;
    for (const ChatPart& part : parts) {
      if (part.is_content) Mark(begin, begin + part.text.size());
      begin += part.text.size();
    }
    WriteMarked();
  }

  const std::string& text() const { return text_; }

  std::vector<uint32_t> Encode() {
    Encoding encoding = Encoder(tables_, text_, true).Encode(false);
    const View<uint8_t>& normalized = tables_.control_normalized;
    bool otherwise = std::any_of(normalized.begin(), normalized.end(), [](uint8_t is) { return is != 0; });
    if (marks_.empty() && !otherwise) return std::move(encoding.ids);
    std::vector<size_t> forged;
    for (const Found& found : Controls(encoding, text_, true)) {
      bool ours = HasUnmarked(found);
      if (!ours && (normalized[found.control] || Has(text_, found))) forged.push_back(found.begin);
    }
    return forged.empty() ? std::move(encoding.ids) : EncodeApart(forged);
  }

 private:
  // Notes the characters of a content that could begin or end a control token.
  void Mark(size_t begin, size_t end) {
    std::array<bool, 256> begins{};  // a control token
    for (size_t i = 0; i < tables_.control.size; ++i) begins[static_cast<uint8_t>(TextOf(i)[0])] = true;
    for (size_t at = begin, next = begin; at < end; at = next) {
      uint32_t code = utf8::Next(text_, &next);
      bool edge = std::binary_search(tables_.edges.begin(), tables_.edges.end(), code);
      bool may_begin = begins[static_cast<uint8_t>(text_[at])];
      for (size_t i = 0; may_begin && !edge && i < tables_.control.size; ++i) {
        std::string_view token = TextOf(i);
        edge = text_.compare(at, token.size(), token) == 0;
      }
      if (edge) marks_.push_back({at, next});
    }
  }

  // The text with a character in the place of marked ones that is nowhere in it.
  void WriteMarked() {
    if (marks_.empty()) return;
    std::string stand_in;
    for (uint32_t code = kStandIns; code < kStandInsEnd; ++code) {
      stand_in.clear();
      utf8::Append(&stand_in, code);
      if (text_.find(stand_in) == std::string::npos) break;
      if (code + 1 == kStandInsEnd) {
        throw Error(Code::kUsage, "the messages have too many kinds of signs")
            .Expected("a free one of U+1D800 to U+1D9FF");
      }
    }
    size_t done = 0, longer = 0;
    for (auto [begin, end] : marks_) {
      marked_.append(text_, done, begin - done);
      longer += stand_in.size() - (end - begin);
      places_.push_back({marked_.size(), longer});
      marked_ += stand_in;
      done = end;
    }
    marked_.append(text_, done);
  }

  std::string_view TextOf(size_t control) const {
    return StringAt(tables_.control_ends, tables_.control_text, control);
  }

  // Where control tokens are. `trims` as the post-processor ByteLevel does with the places of tokens.
  std::vector<Found> Controls(const Encoding& encoding, std::string_view text, bool trims) const {
    std::vector<Found> found;
    for (size_t i = 0; i < encoding.ids.size(); ++i) {
      if (!(tables_.flags[encoding.ids[i]] & TokenizerTables::kControl)) continue;
      const uint32_t* at = std::find(tables_.control.begin(), tables_.control.end(), encoding.ids[i]);
      if (at == tables_.control.end()) continue;
      TextSpan span = encoding.spans[i];
      if (trims && tables_.settings.trims_spaces) span = Trimmed(text, span, i == 0);
      found.push_back({span.begin, span.end, static_cast<size_t>(at - tables_.control.begin())});
    }
    return found;
  }

  TextSpan Trimmed(std::string_view text, TextSpan span, bool first) const {
    auto space = [&](size_t at) {
      return tables_.patterns.classes.Has(tables_.settings.space_class, utf8::Next(text, &at));
    };
    TextSpan made = span;
    size_t count = 0, next = span.begin;
    while (next < span.end && space(next)) {
      utf8::Next(text, &next);
      ++count;
    }
    bool put_first = tables_.settings.trims_spaces == 2 && count == 1 && (first || span.begin == 0);
    if (!put_first) made.begin = static_cast<uint32_t>(next);
    while (made.end > made.begin && space(utf8::Before(text, made.end))) {
      made.end = static_cast<uint32_t>(utf8::Before(text, made.end));
    }
    return made;
  }

  bool Has(std::string_view text, const Found& found) const {
    return text.substr(found.begin, found.end - found.begin).find(TextOf(found.control)) != std::string_view::npos;
  }

  // Whether the template wrote the token there: without a marked character inside.
  bool HasUnmarked(const Found& found) const {
    std::string_view token = TextOf(found.control);
    for (size_t at = text_.find(token, found.begin); at != std::string::npos && at + token.size() <= found.end;
         at = text_.find(token, at + 1)) {
      auto mark = std::lower_bound(marks_.begin(), marks_.end(), std::make_pair(at, size_t{0}));
      if (mark == marks_.end() || mark->first >= at + token.size()) return true;
    }
    return false;
  }

  // The place in the text of one in the marked text.
  size_t InText(size_t place) const {
    auto next = std::lower_bound(places_.begin(), places_.end(), std::make_pair(place, size_t{0}));
    return next == places_.begin() ? place : place - std::prev(next)->second;
  }

  std::vector<uint32_t> EncodeApart(const std::vector<size_t>& forged) {
    std::vector<uint32_t> ids;
    size_t done = 0, after = 0;  // where what has no ids yet begins, and the part after the last control token
    std::string_view text = text_;
    auto reach = [&](size_t begin, size_t end) {
      auto next = std::lower_bound(forged.begin(), forged.end(), after);
      if (next != forged.end() && *next < begin) {
        Append(&ids, Ids(text.substr(done, after - done)));
        Append(&ids, PlainIds(text.substr(after, begin - after)));
        done = begin;
      }
      after = end;
    };
    std::string_view marked = marks_.empty() ? text : std::string_view(marked_);
    for (const Found& found : Controls(Encoder(tables_, marked, true).Encode(false), marked, true)) {
      if (Has(marked, found)) reach(InText(found.begin), InText(found.end));
    }
    reach(text.size(), text.size());
    Append(&ids, Ids(text.substr(done)));
    return ids;
  }

  static void Append(std::vector<uint32_t>* ids, const std::vector<uint32_t>& more) {
    ids->insert(ids->end(), more.begin(), more.end());
  }

  std::vector<uint32_t> Ids(std::string_view text) const { return Encoder(tables_, text, false).Encode(false).ids; }

  // Ids of a text without control tokens. One that is a piece of the vocabulary too is cut in two.
  std::vector<uint32_t> PlainIds(std::string_view text) const {
    if (text.empty()) return {};
    Encoding encoding = Encoder(tables_, text, true).Encode(tables_.settings.plain_differs != 0);
    std::vector<Found> cuts = Controls(encoding, text, tables_.settings.plain_differs == 0);
    cuts.erase(std::remove_if(cuts.begin(), cuts.end(), [&](const Found& found) { return !Has(text, found); }),
               cuts.end());
    if (cuts.empty()) return std::move(encoding.ids);
    std::vector<uint32_t> ids;
    size_t begin = 0;
    for (const Found& cut : cuts) {
      size_t next = cut.begin;
      utf8::Next(text, &next);
      // A control token of one character has no other spelling: it is left out.
      size_t end = cut.end > next ? next : cut.begin;
      if (end > begin) Append(&ids, PlainIds(text.substr(begin, end - begin)));
      begin = next;
    }
    if (begin < text.size()) Append(&ids, PlainIds(text.substr(begin)));
    return ids;
  }

  const TokenizerTables& tables_;
  std::string text_, marked_;                      // `marked_` is empty without marks
  std::vector<std::pair<size_t, size_t>> marks_;   // begin and end in the text
  std::vector<std::pair<size_t, size_t>> places_;  // of stand-ins in `marked_`, by how much it is longer behind them
};

}  // namespace

std::vector<uint32_t> Tokenizer::EncodeChat(const std::vector<ChatPart>& parts) const {
  ApartEncoder encoder(tables_, parts);
  Check(encoder.text());
  std::vector<uint32_t> ids = encoder.Encode();
  CheckRows(ids);
  return ids;
}

}  // namespace mlcpipe
