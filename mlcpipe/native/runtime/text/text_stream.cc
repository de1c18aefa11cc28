#include "text_stream.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <utility>

#include "utf8.h"

namespace mlcpipe {

namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";
constexpr size_t kMaxRunBytes = 48;  // as MAX_RUN_BYTES of streaming.py

bool Contains(const std::vector<uint32_t>& ids, uint32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

struct Begin {
  size_t bytes;  // of a character or, where it is broken, of its longest part
  enum { kWhole, kBroken, kIncomplete } is;
};

// Whether a text that is not empty is two bytes that no third one makes a character. Python's decoder waits for it.
bool BeginsSurrogate(std::string_view text) {
  auto second = static_cast<uint8_t>(text.size() == 2 ? text[1] : 0);
  return text[0] == '\xED' && second >= 0xA0 && second < 0xC0;
}

// The beginning of a text that is not empty: table 3-7 of The Unicode Standard.
Begin BeginOf(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  uint8_t lead = byte(0);
  if (lead < 0x80) return {1, Begin::kWhole};
  if (lead < 0xC2 || lead > 0xF4) return {1, Begin::kBroken};
  size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (BeginsSurrogate(text)) return {2, Begin::kIncomplete};
  for (size_t i = 1; i < size; ++i) {
    if (i == text.size()) return {i, Begin::kIncomplete};
    if (byte(i) < low || byte(i) > high) return {i, Begin::kBroken};
    low = 0x80;
    high = 0xBF;
  }
  return {size, Begin::kWhole};
}

}  // namespace

StopMatcher::StopMatcher(const std::vector<std::string>& stops) : nodes_(1) {
  for (const std::string& stop : stops) {
    if (stop.empty() || utf8::ValidPrefix(stop) != stop.size()) {
      throw Error(Code::kUsage, "stop").Expected("strings of UTF-8 that are not empty").Found("\"" + stop + "\"");
    }
    uint32_t at = 0;
    for (char c : stop) {
      auto [child, is_new] = nodes_[at].children.try_emplace(c, static_cast<uint32_t>(nodes_.size()));
      uint32_t next = child->second;
      if (is_new) nodes_.push_back({{}, 0, nodes_[at].depth + 1, 0});
      at = next;
    }
    nodes_[at].matched = stop.size();
  }
  std::deque<uint32_t> queue{0};
  for (; !queue.empty(); queue.pop_front()) {
    for (auto [c, child] : nodes_[queue.front()].children) {
      nodes_[child].fail = queue.front() == 0 ? 0 : Next(nodes_[queue.front()].fail, c);
      if (!nodes_[child].matched) nodes_[child].matched = nodes_[nodes_[child].fail].matched;
      queue.push_back(child);
    }
  }
}

uint32_t StopMatcher::Next(uint32_t state, char c) const {
  for (;;) {
    auto child = nodes_[state].children.find(c);
    if (child != nodes_[state].children.end()) return child->second;
    if (state == 0) return 0;
    state = nodes_[state].fail;
  }
}

std::string StopMatcher::Push(std::string_view text, bool* found) {
  *found = false;
  for (char c : text) {
    held_ += c;
    state_ = Next(state_, c);
    if (size_t matched = nodes_[state_].matched) {
      *found = true;
      found_ = held_.substr(held_.size() - matched);
      std::string shown = held_.substr(0, held_.size() - matched);
      held_.clear();
      state_ = 0;
      return shown;
    }
  }
  std::string shown = held_.substr(0, held_.size() - nodes_[state_].depth);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopMatcher::Flush() {
  state_ = 0;
  return std::exchange(held_, {});
}

std::string Utf8Stream::Push(std::string_view bytes) {
  held_ += bytes;
  std::string text;
  size_t at = 0;
  while (at < held_.size()) {
    Begin begin = BeginOf(std::string_view(held_).substr(at));
    if (begin.is == Begin::kIncomplete) break;
    if (begin.is == Begin::kWhole) {
      text.append(held_, at, begin.bytes);
    } else {
      text += kReplacement;
    }
    at += begin.bytes;
  }
  held_.erase(0, at);
  return text;
}

std::string Utf8Stream::Flush() {
  std::string text = held_.empty() ? "" : kReplacement;
  if (!held_.empty() && BeginsSurrogate(held_)) text += kReplacement;
  held_.clear();
  return text;
}

TextStream::TextStream(const Tokenizer& tokenizer, StreamOptions options)
    : tables_(tokenizer.tables()),
      options_(std::move(options)),
      stops_(options_.stops),
      max_run_(kMaxRunBytes),
      strip_left_(options_.continues || tables_.settings.strip_char == kNone ? 0 : tables_.settings.strip_count) {}

std::string TextStream::Push(uint32_t token) {
  if (stopped_) return "";
  if (Contains(options_.ends, token)) {
    std::string text = Finish();
    stopped_ = true;  // also where the held text has completed a stop string
    return text;
  }
  uint8_t flags = token < tables_.flags.size ? tables_.flags[token] : 0;
  if (!(flags & TokenizerTables::kKnown)) return "";
  if (!(flags & TokenizerTables::kSkipped)) {
    return Put(tables_.Piece(token, first_ && !options_.continues), flags & TokenizerTables::kByte);
  }
  return Contains(options_.shown, token) ? Put(tables_.Piece(token, false), false) : "";
}

std::string TextStream::Put(std::string_view data, bool is_byte) {
  std::string spaced;
  if (tables_.settings.spaced && !first_) data = spaced = " " + std::string(data);
  first_ = false;
  if (is_byte) return Release(GrowRun(data));
  std::string before = run_.empty() ? "" : EndRun();
  return Release(before + utf8_.Push(data));
}

std::string TextStream::Flush() { return stopped_ ? "" : Finish(); }

std::string TextStream::Finish() {
  std::string text = EndRun();
  text = Release(text + utf8_.Flush());
  if (!stopped_) text += stops_.Flush();
  return text;
}

// Drops the decoder's leading strip and looks for stop strings.
std::string TextStream::Release(std::string text) {
  while (strip_left_ && !text.empty()) {
    size_t next = 0;
    if (utf8::Next(text, &next) != tables_.settings.strip_char) {
      strip_left_ = 0;
    } else {
      text.erase(0, next);
      --strip_left_;
    }
  }
  return stops_.empty() || text.empty() ? text : stops_.Push(text, &stopped_);
}

std::string TextStream::GrowRun(std::string_view data) {
  run_ += data;
  if (run_state_ == Run::kWhole && run_.size() < max_run_) return "";
  if (run_state_ == Run::kBroken) return ReplacedRun();
  size_t at = 0;
  while (at < run_.size()) {
    Begin begin = BeginOf(std::string_view(run_).substr(at));
    if (begin.is == Begin::kIncomplete) break;
    if (begin.is == Begin::kBroken) {
      run_state_ = Run::kBroken;
      return ReplacedRun();
    }
    at += begin.bytes;
  }
  run_state_ = Run::kLong;
  std::string text = run_.substr(0, at);
  run_.erase(0, at);
  return text;
}

std::string TextStream::EndRun() {
  run_state_ = Run::kWhole;
  return utf8::ValidPrefix(run_) == run_.size() ? std::exchange(run_, {}) : ReplacedRun();
}

// The rule of `tokenizers`: a run that is not UTF-8 as a whole is one U+FFFD a byte.
std::string TextStream::ReplacedRun() {
  std::string text;
  for (size_t i = 0; i < run_.size(); ++i) text += kReplacement;
  run_.clear();
  return text;
}

std::string Tokenizer::Decode(const std::vector<uint32_t>& ids, bool skip_special_tokens) const {
  TextStream stream(*this, {});
  stream.max_run_ = std::numeric_limits<size_t>::max();
  std::string text;
  for (uint32_t id : ids) {
    uint8_t flags = id < tables_.flags.size ? tables_.flags[id] : 0;
    if (!(flags & TokenizerTables::kKnown) || (skip_special_tokens && flags & TokenizerTables::kSkipped)) continue;
    text += stream.Put(tables_.Piece(id, stream.first_), flags & TokenizerTables::kByte);
  }
  return text + stream.Flush();
}

}  // namespace mlcpipe
