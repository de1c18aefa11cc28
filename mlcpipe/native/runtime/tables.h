// A file of tables to map, as mlcpipe/compiler/text/tables.py writes it: nothing is copied, everything is checked.
#ifndef MLCPIPE_RUNTIME_TABLES_H_
#define MLCPIPE_RUNTIME_TABLES_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "error.h"

namespace mlcpipe {

// Elements of a table, which lie in the mapped file.
template <typename T>
struct View {
  const T* data = nullptr;
  size_t size = 0;

  const T& operator[](size_t i) const { return data[i]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};

// Little-endian: the kind in 8 bytes, version and number of sections as u32, then offset and length of each as u64.
// Sections lie one after the other, each at a multiple of 8.
class Tables {
 public:
  // `data` must stay, and lie at a multiple of 8. Throws Error with `code` unless it has just these sections.
  Tables(const void* data, size_t bytes, std::string_view kind, uint32_t version, uint32_t sections, Code code)
      : data_(static_cast<const uint8_t*>(data)), kind_(kind), code_(code) {
    static_assert(sizeof(Header) == 16 && sizeof(Section) == 16, "as written");
    if (reinterpret_cast<uintptr_t>(data) % 8) throw Broken("an address that is a multiple of 8");
    Header header;
    if (bytes < sizeof header) throw Broken("a header of 16 bytes").Found(std::to_string(bytes) + " bytes");
    std::memcpy(&header, data, sizeof header);
    if (kind.size() != 8 || std::memcmp(header.kind, kind.data(), 8) != 0) throw Broken("its kind at the start");
    if (header.version != version || header.sections != sections) {
      throw Broken("version " + std::to_string(version) + " with " + std::to_string(sections) + " sections")
          .Found("version " + std::to_string(header.version) + " with " + std::to_string(header.sections))
          .Next("compile the model again");
    }
    uint64_t end = sizeof header + sizeof(Section) * uint64_t{sections};
    if (end > bytes) throw Broken("the list of sections");
    sections_ = reinterpret_cast<const Section*>(data_ + sizeof header);
    for (uint32_t i = 0; i < sections; ++i) {
      const Section& section = sections_[i];
      if (section.offset % 8 || section.offset < end || section.offset > bytes ||
          section.bytes > bytes - section.offset) {
        throw Broken("section " + std::to_string(i) + " inside the file");
      }
      end = section.offset + section.bytes;
    }
    if (end != bytes) throw Broken(std::to_string(end) + " bytes").Found(std::to_string(bytes));
  }

  // A section as numbers or trivial structs without padding.
  template <typename T>
  View<T> array(uint32_t section) const {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 8, "lies in the file as it is");
    const Section& at = sections_[section];
    if (at.bytes % sizeof(T)) throw Broken("whole elements in section " + std::to_string(section));
    return {reinterpret_cast<const T*>(data_ + at.offset), static_cast<size_t>(at.bytes / sizeof(T))};
  }

  // A section with the first and the next ones' ends of strings, in order, over a section with their bytes.
  View<uint32_t> ends(uint32_t section, uint32_t text) const {
    View<uint32_t> ends = array<uint32_t>(section);
    uint32_t last = 0;
    for (uint32_t end : ends) {
      if (end < last) throw Broken("ends of strings in order in section " + std::to_string(section));
      last = end;
    }
    if (last != sections_[text].bytes) throw Broken("all bytes of strings in section " + std::to_string(text));
    return ends;
  }

  Error Broken(std::string expected) const {
    return Error(code_, "a damaged file of tables").Where(kind_).Expected(std::move(expected));
  }

 private:
  struct Header {
    char kind[8];
    uint32_t version, sections;
  };
  struct Section {
    uint64_t offset, bytes;
  };

  const uint8_t* data_;
  const Section* sections_ = nullptr;
  std::string kind_;
  Code code_;
};

// String `i` of those that `Tables::ends` checked.
inline std::string_view StringAt(View<uint32_t> ends, View<char> text, size_t i) {
  uint32_t begin = i ? ends[i - 1] : 0;
  return {text.data + begin, ends[i] - begin};
}

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TABLES_H_
