#include "text/value_characters.h"

#include <algorithm>

namespace mlcpipe::chat {

namespace {

size_t CodeBytes(unsigned char first) { return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

}  // namespace

size_t CountChars(std::string_view text) {
  return text.size() - static_cast<size_t>(std::count_if(text.begin(), text.end(), utf8::IsContinuation));
}

size_t ByteOf(std::string_view text, size_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) at += CodeBytes(static_cast<unsigned char>(text[at]));
  return std::min(at, text.size());
}

bool IsSpace(uint32_t code) {
  if (code < 0x80) return (code >= 9 && code <= 13) || (code >= 28 && code <= 32);
  return code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 ||
         code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

bool Characters::Is(Class kind, uint32_t code) const {
  auto key = static_cast<uint32_t>(kind);
  auto before = [&](uint32_t sought, const ClassRange& range) {
    return key != range.kind ? key < range.kind : sought < range.first;
  };
  const ClassRange* end = std::upper_bound(ranges.begin(), ranges.end(), code, before);
  return end != ranges.begin() && end[-1].kind == key && code <= end[-1].last;
}

void Characters::Append(Case kind, uint32_t code, std::string* out) const {
  auto key = static_cast<uint32_t>(kind);
  if (code < 0x80) {
    bool lower = code >= 'a' && code <= 'z', upper = code >= 'A' && code <= 'Z';
    out->push_back(static_cast<char>((kind == Case::kLower ? upper : lower) ? code ^ 32 : code));
    return;
  }
  const CaseMapping* found = std::lower_bound(
      mappings.begin(), mappings.end(), code,
      [&](const CaseMapping& one, uint32_t sought) { return one.kind != key ? one.kind < key : one.code < sought; });
  if (found != mappings.end() && found->kind == key && found->code == code) {
    out->append(StringAt(ends, bytes, found->string));
  } else {
    utf8::Append(out, code);
  }
}

// A sigma at the end of a word has a form of its own.
void Characters::AppendLower(std::string_view text, size_t at, uint32_t code, std::string* out) const {
  if (code != 0x3A3) return Append(Case::kLower, code, out);
  bool before = false, after = false;
  for (size_t i = at; i > 0;) {
    size_t next = i = utf8::Before(text, i);
    uint32_t one = utf8::Next(text, &next);
    if (Is(Class::kCaseIgnorable, one)) continue;
    before = Is(Class::kCased, one);
    break;
  }
  for (size_t i = at + 2; before && i < text.size();) {
    uint32_t one = utf8::Next(text, &i);
    if (Is(Class::kCaseIgnorable, one)) continue;
    after = Is(Class::kCased, one);
    break;
  }
  utf8::Append(out, before && !after ? 0x3C2 : 0x3C3);
}

std::string Characters::Lower(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    AppendLower(text, begin, utf8::Next(text, &at), &out);
  }
  return out;
}

std::string Characters::Upper(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) Append(Case::kUpper, utf8::Next(text, &at), &out);
  return out;
}

std::string Characters::Title(std::string_view text) const {
  std::string out;
  bool inside = false;
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    uint32_t code = utf8::Next(text, &at);
    inside ? AppendLower(text, begin, code, &out) : Append(Case::kTitle, code, &out);
    inside = Is(Class::kCased, code);
  }
  return out;
}

std::string Characters::Capitalize(std::string_view text) const {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    uint32_t code = utf8::Next(text, &at);
    begin ? AppendLower(text, begin, code, &out) : Append(Case::kTitle, code, &out);
  }
  return out;
}

}  // namespace mlcpipe::chat
