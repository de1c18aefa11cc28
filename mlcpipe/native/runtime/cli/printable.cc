#include "cli/printable.h"

#include <algorithm>
#include <iterator>

#include "text/utf8.h"

namespace mlcpipe::cli {
namespace {

// First and last of the characters that steer, reorder or hide: C0 but for tab and newline, C1, bidirectional controls
// (Unicode UAX #9), the mark of the byte order, annotations and tags.
constexpr uint32_t kUnsafe[][2] = {{0, 8},           {0x0B, 0x1F},     {0x7F, 0x9F},     {0x061C, 0x061C},
                                   {0x200E, 0x200F}, {0x202A, 0x202E}, {0x2066, 0x2069}, {0xFEFF, 0xFEFF},
                                   {0xFFF9, 0xFFFB}, {0xE0000, 0xE007F}};

bool IsUnsafe(uint32_t code) {
  return std::any_of(std::begin(kUnsafe), std::end(kUnsafe),
                     [&](const uint32_t (&range)[2]) { return range[0] <= code && code <= range[1]; });
}

}  // namespace

std::string Printable(std::string_view text) {
  std::string printable;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const uint32_t code = utf8::Next(text, &at);
    if (code > 0x7F && at == begin + 1) printable += '?';
    else if (code == 0x2028 || code == 0x2029) printable += '\n';  // separators of lines and paragraphs
    else if (!IsUnsafe(code)) printable += text.substr(begin, at - begin);
  }
  return printable;
}

}  // namespace mlcpipe::cli
