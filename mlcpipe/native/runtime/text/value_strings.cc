#include "text/value_strings.h"

#include <algorithm>

#include "text/value_access.h"
#include "text/value_format.h"

namespace mlcpipe::chat {

namespace {

constexpr int64_t kMaxWidth = 10'000;     // MAX_WIDTH of template_sandbox.py
constexpr uint32_t kMaxQuadratic = 1000;  // _MAX_QUADRATIC_CHARS

void CheckShort(const Value& value, const char* what) {
  if (!value.is(Kind::kString) || value.string->chars <= kMaxQuadratic) return;
  Stop(std::string(what) + " of more than " + std::to_string(kMaxQuadratic) + " characters");
}

// The part that methods with `start` and `end` look at, and the character at which it begins; -1 for none.
Value Window(Heap* heap, const Value& self, const Args& args, int64_t* begin) {
  *begin = 0;
  if (args.size() < 2) return self;
  Value start = args[1], stop = args.size() > 2 ? args[2] : None();
  auto size = static_cast<int64_t>(self.string->chars);
  int64_t first = start.is(Kind::kNone) ? 0 : ToIndex(start);
  *begin = first < 0 ? std::max<int64_t>(first + size, 0) : first;
  int64_t last = stop.is(Kind::kNone) ? size : ToIndex(stop);
  last = std::min(last < 0 ? last + size : last, size);
  if (*begin > last) *begin = -1;
  return Slice(heap, self, start, stop, None());
}

Value SplitSpaces(Heap* heap, const Value& self, int64_t most, bool from_right) {
  std::string_view text = self.text();
  std::vector<std::pair<size_t, size_t>> words;
  size_t begin = std::string_view::npos;
  for (size_t at = 0; at < text.size();) {
    size_t here = at;
    bool space = IsSpace(utf8::Next(text, &at));
    if (!space && begin == std::string_view::npos) begin = here;
    if (space && begin != std::string_view::npos) words.emplace_back(begin, here);
    if (space) begin = std::string_view::npos;
  }
  if (begin != std::string_view::npos) words.emplace_back(begin, text.size());
  auto limit = static_cast<size_t>(most < 0 ? INT64_MAX : most);
  if (words.size() > limit && !from_right) {  // the rest with its spaces, but those around it
    size_t rest = words[limit].first;
    words.resize(limit);
    words.emplace_back(rest, text.size());
  } else if (words.size() > limit) {
    size_t kept = words.size() - limit;
    words.erase(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(kept - 1));
    words[0].first = 0;
  }
  std::vector<Value> parts;
  for (auto [first, end] : words) parts.push_back(heap->Part(self, first, end - first));
  return heap->Copied(Kind::kList, parts);
}

}  // namespace

std::string_view TextOf(const Value& value) {
  if (value.is(Kind::kUndefined)) FailUndefined(value);
  if (!value.is(Kind::kString)) Fail("TypeError", std::string("must be str, not ") + TypeName(value.kind));
  return value.text();
}

int64_t CountOf(const Args& args, size_t index) { return args.size() > index ? ToIndex(args[index]) : -1; }

Value FindIn(Heap* heap, const Value& self, const Args& args, bool last) {
  int64_t begin = 0;
  std::string_view part = TextOf(args[0]);
  if (last) CheckShort(args[0], "rfind");
  Value window = Window(heap, self, args, &begin);
  std::string_view text = window.text();
  if (last) heap->Tick(1 + text.size() * (1 + part.size()) / Limits::kStepBytes);
  size_t found = begin < 0 ? std::string_view::npos : last ? text.rfind(part) : Find(heap, text, part, 0);
  if (found == std::string_view::npos) return Int(-1);
  heap->TickBytes(found);
  return Int(begin + static_cast<int64_t>(CountChars(text.substr(0, found))));
}

Value IndexIn(Heap* heap, const Value& self, const Args& args, bool last) {
  Value found = FindIn(heap, self, args, last);
  if (found.integer < 0) Fail("ValueError", "substring not found");
  return found;
}

Value CountIn(Heap* heap, const Value& self, const Args& args) {
  int64_t begin = 0, count = 0;
  std::string_view part = TextOf(args[0]);
  Value window = Window(heap, self, args, &begin);
  if (begin < 0) return Int(0);
  if (part.empty()) return Int(int64_t{window.string->chars} + 1);
  for (size_t at = 0; (at = Find(heap, window.text(), part, at)) != std::string_view::npos; at += part.size()) ++count;
  return Int(count);
}

Value Begins(Heap* heap, const Value& self, const Args& args, bool at_end) {
  int64_t begin = 0;
  Value window = Window(heap, self, args, &begin);
  std::string_view text = window.text();
  Span options = args[0].is(Kind::kTuple) ? args[0].list->span : Span{&args[0], 1};
  for (const Value& option : options) {
    std::string_view part = TextOf(option);
    heap->TickBytes(part.size());
    if (begin < 0 || part.size() > text.size()) continue;
    if (text.compare(at_end ? text.size() - part.size() : 0, part.size(), part) == 0) return Bool(true);
  }
  return Bool(false);
}

Value Split(Heap* heap, const Value& self, const Args& args, bool from_right) {
  heap->TickBytes(self.string->bytes);
  int64_t most = CountOf(args, 1);
  if (args.empty() || args[0].is(Kind::kNone)) return SplitSpaces(heap, self, most, from_right);
  std::string_view text = self.text(), separator = TextOf(args[0]);
  if (separator.empty()) Fail("ValueError", "empty separator");
  if (from_right) CheckShort(args[0], "rsplit");
  std::vector<size_t> cuts;
  if (!from_right) {
    for (size_t at = 0; most < 0 || cuts.size() < static_cast<size_t>(most); at = cuts.back() + separator.size()) {
      size_t found = Find(heap, text, separator, at);
      if (found == std::string_view::npos) break;
      cuts.push_back(found);
    }
  } else {
    heap->Tick(1 + text.size() * separator.size() / Limits::kStepBytes);
    for (size_t end = text.size(); end >= separator.size() && (most < 0 || cuts.size() < static_cast<size_t>(most));) {
      size_t found = text.rfind(separator, end - separator.size());
      if (found == std::string_view::npos) break;
      cuts.push_back(end = found);
    }
    std::reverse(cuts.begin(), cuts.end());
  }
  heap->FitItems(cuts.size());
  std::vector<Value> parts;
  size_t begin = 0;
  for (size_t cut : cuts) {
    parts.push_back(heap->Part(self, begin, cut - begin));
    begin = cut + separator.size();
  }
  parts.push_back(heap->Part(self, begin, text.size() - begin));
  return heap->Copied(Kind::kList, parts);
}

Value Partition(Heap* heap, const Value& self, const Args& args, bool last) {
  std::string_view text = self.text(), separator = TextOf(args[0]);
  if (separator.empty()) Fail("ValueError", "empty separator");
  if (last) CheckShort(args[0], "rpartition");
  if (last) heap->Tick(1 + text.size() * separator.size() / Limits::kStepBytes);
  size_t found = last ? text.rfind(separator) : Find(heap, text, separator, 0);
  Value empty = heap->String("", self.safe);
  if (found == std::string_view::npos) {
    return heap->Copied(Kind::kTuple, {last ? empty : self, empty, last ? self : empty});
  }
  size_t after = found + separator.size();
  return heap->Copied(Kind::kTuple, {heap->Part(self, 0, found), heap->Part(self, found, separator.size()),
                                     heap->Part(self, after, text.size() - after)});
}

Value Zeros(Heap* heap, const Value& self, const Args& args) {
  std::string_view text = self.text();
  bool sign = !text.empty() && (text[0] == '-' || text[0] == '+');
  Value rest = heap->Part(self, sign, text.size() - sign);
  Value padded = Center(heap, rest, ToIndex(args[0]) - sign, "0", '>');
  return heap->String(std::string(text.substr(0, sign)) += padded.text(), self.safe);
}

Value Without(Heap* heap, const Value& self, const Args& args, bool at_end) {
  std::string_view text = self.text(), part = TextOf(args[0]);
  if (part.size() > text.size() || part.empty()) return self;
  size_t rest = text.size() - part.size();
  bool found = text.compare(at_end ? rest : 0, part.size(), part) == 0;
  return found ? heap->Part(self, at_end ? 0 : part.size(), rest) : self;
}

Value Strip(Heap* heap, const Value& text, const Value& chars, int sides) {
  CheckShort(chars, "strip");
  std::string_view all = text.text(), set = chars.is(Kind::kNone) ? "" : TextOf(chars);
  heap->TickBytes(all.size());
  auto strips = [&](size_t at, size_t bytes) {
    size_t begin = 0;
    if (chars.is(Kind::kNone)) return IsSpace(utf8::Next(all, &(begin = at)));
    heap->TickBytes(set.size());
    return set.find(all.substr(at, bytes)) != std::string_view::npos;  // a character's bytes are no part of another's
  };
  size_t begin = 0, end = all.size();
  while ((sides & 1) && begin < end) {
    size_t next = begin;
    utf8::Next(all, &next);
    if (!strips(begin, next - begin)) break;
    begin = next;
  }
  while ((sides & 2) && begin < end) {
    size_t last = utf8::Before(all, end);
    if (!strips(last, end - last)) break;
    end = last;
  }
  return heap->Part(text, begin, end - begin);
}

Value Replace(Heap* heap, const Value& text, const Value& old_value, const Value& with_value, int64_t count) {
  std::string_view all = text.text(), old = TextOf(old_value), with = TextOf(with_value);
  std::string out;
  size_t at = 0;
  auto put = [&](std::string_view part) {
    out += part;
    heap->FitText(out.size() / 4);
  };
  for (size_t done = 0; count < 0 || done < static_cast<size_t>(count); ++done) {
    if (old.empty()) {  // before each character and at the end
      heap->TickBytes(with.size());
      put(with);
      if (at == all.size()) break;
      size_t begin = at;
      utf8::Next(all, &at);
      put(all.substr(begin, at - begin));
      continue;
    }
    size_t found = Find(heap, all, old, at);
    if (found == std::string_view::npos) break;
    heap->TickBytes(with.size());
    put(all.substr(at, found - at));
    put(with);
    at = found + old.size();
  }
  put(all.substr(at));
  return heap->String(out, text.safe);
}

Value Join(Heap* heap, std::string_view separator, Span parts) {
  std::string out;
  for (size_t i = 0; i < parts.size; ++i) {
    heap->TickBytes(separator.size());
    if (i) out += separator;
    out += ToString(heap, parts[i]).text();
    heap->FitText(out.size() / 4);
  }
  return heap->String(out);
}

std::vector<Value> SplitLines(Heap* heap, const Value& text, bool keep_ends) {
  std::vector<Value> lines;
  std::string_view all = text.text();
  size_t begin = 0;
  for (size_t at = 0; at < all.size();) {
    size_t end = at;
    uint32_t code = utf8::Next(all, &at);
    bool breaks = (code >= 10 && code <= 13) || (code >= 28 && code <= 30) || code == 0x85;
    breaks = breaks || code == 0x2028 || code == 0x2029;
    if (!breaks) continue;
    if (code == '\r' && at < all.size() && all[at] == '\n') ++at;
    lines.push_back(heap->Part(text, begin, (keep_ends ? at : end) - begin));
    begin = at;
  }
  if (begin < all.size()) lines.push_back(heap->Part(text, begin, all.size() - begin));
  return lines;
}

Value Center(Heap* heap, const Value& text, int64_t width, std::string_view fill, char align) {
  if (width > kMaxWidth || width < -kMaxWidth) Stop("padding by more than " + std::to_string(kMaxWidth));
  auto chars = static_cast<int64_t>(text.string->chars), missing = width - chars;
  if (missing <= 0) return text;
  int64_t left = align == '<' ? 0 : align == '>' ? missing : missing / 2 + (missing & width & 1);
  std::string out;
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += text.text();
  for (int64_t i = left; i < missing; ++i) out += fill;
  return heap->String(out, text.safe);
}

}  // namespace mlcpipe::chat
