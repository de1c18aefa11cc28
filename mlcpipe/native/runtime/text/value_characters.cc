#include "text/value_characters.h"

#include <algorithm>

namespace mlcpipe::chat {

namespace {

size_t CodeBytes(unsigned char first) { return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

}  // namespace

uint32_t NextCode(std::string_view text, size_t* at) {
  auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[*at + i])); };
  uint32_t first = byte(0), code = first;
  size_t bytes = CodeBytes(static_cast<unsigned char>(first));
  if (bytes == 2) code = (first & 31) << 6 | (byte(1) & 63);
  if (bytes == 3) code = (first & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
  if (bytes == 4) code = (first & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
  *at += bytes;
  return code;
}

void AppendCode(uint32_t code, std::string* out) {
  auto put = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xC0 | code >> 6);
  } else {
    if (code < 0x10000) {
      put(0xE0 | code >> 12);
    } else {
      put(0xF0 | code >> 18);
      put(0x80 | (code >> 12 & 63));
    }
    put(0x80 | (code >> 6 & 63));
  }
  put(0x80 | (code & 63));
}

bool IsUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    unsigned char first = static_cast<unsigned char>(text[at]);
    if (first < 0x80) {
      ++at;
      continue;
    }
    size_t bytes = CodeBytes(first);
    if (first < 0xC2 || first > 0xF4 || bytes > text.size() - at) return false;
    for (size_t i = 1; i < bytes; ++i) {
      if (!IsContinuation(text[at + i])) return false;
    }
    uint32_t code = NextCode(text, &at);
    if ((bytes == 3 && code < 0x800) || (bytes == 4 && (code < 0x10000 || code > 0x10FFFF))) return false;
    if (code >= 0xD800 && code < 0xE000) return false;
  }
  return true;
}

size_t CountChars(std::string_view text) {
  return text.size() - static_cast<size_t>(std::count_if(text.begin(), text.end(), IsContinuation));
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
  const ClassRange* end = std::upper_bound(
      ranges.begin(), ranges.end(), code,
      [&](uint32_t sought, const ClassRange& range) { return key != range.kind ? key < range.kind : sought < range.first; });
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
    AppendCode(code, out);
  }
}

// A sigma at the end of a word has a form of its own.
void Characters::AppendLower(std::string_view text, size_t at, uint32_t code, std::string* out) const {
  if (code != 0x3A3) return Append(Case::kLower, code, out);
  bool before = false, after = false;
  for (size_t i = at; i > 0;) {
    do --i;
    while (IsContinuation(text[i]));
    size_t next = i;
    uint32_t one = NextCode(text, &next);
    if (Is(Class::kCaseIgnorable, one)) continue;
    before = Is(Class::kCased, one);
    break;
  }
  for (size_t i = at + 2; before && i < text.size();) {
    uint32_t one = NextCode(text, &i);
    if (Is(Class::kCaseIgnorable, one)) continue;
    after = Is(Class::kCased, one);
    break;
  }
  AppendCode(before && !after ? 0x3C2 : 0x3C3, out);
}

std::string Characters::Lower(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    AppendLower(text, begin, NextCode(text, &at), &out);
  }
  return out;
}

std::string Characters::Upper(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) Append(Case::kUpper, NextCode(text, &at), &out);
  return out;
}

std::string Characters::Title(std::string_view text) const {
  std::string out;
  bool inside = false;
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    uint32_t code = NextCode(text, &at);
    inside ? AppendLower(text, begin, code, &out) : Append(Case::kTitle, code, &out);
    inside = Is(Class::kCased, code);
  }
  return out;
}

std::string Characters::Capitalize(std::string_view text) const {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    uint32_t code = NextCode(text, &at);
    begin ? AppendLower(text, begin, code, &out) : Append(Case::kTitle, code, &out);
  }
  return out;
}

}  // namespace mlcpipe::chat
