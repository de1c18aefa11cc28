#include "text/harmony.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <utility>

namespace mlcpipe::harmony {
namespace {

constexpr std::string_view kMarks[] = {kStart,      kChannel,   "<|constrain|>", kMessage,
                                       "<|end|>", "<|call|>", "<|return|>"};
constexpr std::string_view kBegins[] = {kChannel, kStart, "to="};  // of the first header
constexpr std::string_view kAnalysis = "analysis", kCommentary = "commentary", kFinal = "final";
constexpr size_t kMaxHeader = 1024;  // bytes; a longer one is text

bool BeginsWith(std::string_view text, std::string_view begin) { return text.substr(0, begin.size()) == begin; }

bool IsWord(char c) { return c == '_' || std::isalnum(static_cast<unsigned char>(c)) || (c & 0x80); }

std::string_view ChannelOf(std::string_view header) {
  for (size_t at; (at = header.find(kChannel)) != header.npos;) {
    header.remove_prefix(at + kChannel.size());
    std::string_view name = Stripped(header);
    name = name.substr(0, static_cast<size_t>(std::find_if_not(name.begin(), name.end(), IsWord) - name.begin()));
    if (!name.empty()) return name;
  }
  return kFinal;
}

}  // namespace

std::vector<uint32_t> Marks(const Tokenizer& tokenizer) {
  std::vector<uint32_t> ids;
  const TokenizerTables& tables = tokenizer.tables();
  for (size_t id = 0; id < tables.flags.size; ++id) {
    const auto token = static_cast<uint32_t>(id);
    if (!(tables.flags[id] & TokenizerTables::kSkipped)) continue;
    if (std::count(std::begin(kMarks), std::end(kMarks), tables.Piece(token, false))) ids.push_back(token);
  }
  return ids;
}

Text::Text() : ends_({"<|end|>", "<|call|>", "<|return|>", std::string(kStart), std::string(kChannel)}) {}

std::string Text::Push(std::string_view text) {
  std::string shown;
  for (char c : text) shown += in_header_ ? ReadHeader(c) : ReadText(c);
  return shown;
}

std::string Text::Flush(std::string_view text) {
  const bool thinks = last_ == kAnalysis;
  begins_ = false;
  std::string shown = Push(text);
  if (!in_header_) {
    shown += Shown(ends_.Flush());
  } else if (std::string header = std::exchange(header_, {});
             !begun_ && !Stripped(header).empty() && header.find("<|") == header.npos) {
    Begin(kFinal);
    shown += Shown(header);
  }
  if (thinks && !begins_) shown += kThinkEnd.substr(0, kThinkEnd.size() - 2);
  return shown;
}

std::string Text::ReadHeader(char c) {
  header_ += c;
  const std::string_view start = Stripped(header_);
  const bool plain = !begun_ && std::none_of(std::begin(kBegins), std::end(kBegins), [&](std::string_view begin) {
    return BeginsWith(begin, start) || BeginsWith(start, begin);
  });
  const bool ended = header_.size() >= kMessage.size() &&
                     header_.compare(header_.size() - kMessage.size(), kMessage.size(), kMessage) == 0;
  if (!plain && !ended && header_.size() <= kMaxHeader) return "";
  const std::string header = std::exchange(header_, {});
  Begin(plain || !ended ? kFinal : ChannelOf(header));
  if (plain) return Push(header);
  return ended ? "" : Shown(header);
}

std::string Text::ReadText(char c) {
  bool found = false;
  const std::string shown = Shown(ends_.Push({&c, 1}, &found));
  if (found) {
    in_header_ = true;
    header_ = ends_.found() == kChannel ? kChannel : "";
  }
  return shown;
}

void Text::Begin(std::string_view channel) {
  in_header_ = false;
  begun_ = begins_ = true;
  channel_ = channel;
}

std::string Text::Shown(std::string_view text) {
  if (text.empty()) return "";
  const std::string before = std::exchange(last_, channel_);
  if (channel_ == before) return std::string(text);
  std::string shown(before == kAnalysis ? kThinkEnd : "");
  if (channel_ == kAnalysis) {
    shown += kThinkBegin;
  } else if (before == kCommentary) {
    shown += "\n\n";
  }
  return shown.append(text);
}

}  // namespace mlcpipe::harmony
