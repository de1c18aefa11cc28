// Characters as Python's str knows them: tables of mlcpipe/compiler/text/template_characters.py, and places in UTF-8.
#ifndef MLCPIPE_RUNTIME_TEXT_VALUE_CHARACTERS_H_
#define MLCPIPE_RUNTIME_TEXT_VALUE_CHARACTERS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tables.h"
#include "text/utf8.h"

namespace mlcpipe::chat {

enum class Class : uint32_t { kUnprintable, kCased, kCaseIgnorable, kAlpha, kDecimal, kDigit, kNumeric, kCount };
enum class Case : uint32_t { kLower, kUpper, kTitle, kCount };

struct ClassRange {
  uint32_t kind, first, last;  // ordered by kind, then first
};
struct CaseMapping {
  uint32_t kind, code, string;  // ordered by kind, then code
};

// Tables that a program brings, of the classes that it needs.
struct Characters {
  View<ClassRange> ranges;
  View<CaseMapping> mappings;
  View<uint32_t> ends;
  View<char> bytes;

  bool Is(Class kind, uint32_t code) const;
  // Appends what the character becomes.
  void Append(Case kind, uint32_t code, std::string* out) const;
  // Python's str.lower, str.upper, str.title, str.capitalize.
  std::string Lower(std::string_view text) const;
  std::string Upper(std::string_view text) const;
  std::string Title(std::string_view text) const;
  std::string Capitalize(std::string_view text) const;

 private:
  void AppendLower(std::string_view text, size_t at, uint32_t code, std::string* out) const;
};

size_t CountChars(std::string_view text);
// The byte at which character `index` begins.
size_t ByteOf(std::string_view text, size_t index);
// Python's str.isspace for a character.
bool IsSpace(uint32_t code);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_VALUE_CHARACTERS_H_
