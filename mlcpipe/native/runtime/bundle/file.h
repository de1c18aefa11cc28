// Files of a bundle: mapped read-only, so that what is not touched takes no memory.
#ifndef MLCPIPE_RUNTIME_BUNDLE_FILE_H_
#define MLCPIPE_RUNTIME_BUNDLE_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "../error.h"

namespace mlcpipe {

// A regular file. Never truncate one that is mapped: the next access raises SIGBUS. Replace a bundle by renaming.
class MappedFile {
 public:
  // `name` in the folder of a bundle. Throws kBundle for a file that is not there, cannot be read or is not regular or
  // longer than `max_bytes`, kResource where the system maps no more.
  static std::shared_ptr<const MappedFile> Open(const std::string& folder, const std::string& name,
                                                uint64_t max_bytes = UINT64_MAX);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), static_cast<size_t>(bytes_)}; }

 private:
  MappedFile(const uint8_t* data, uint64_t bytes) : data_(data), bytes_(bytes) {}

  const uint8_t* data_;
  uint64_t bytes_;
};

// The error of a bundle whose file is not what its manifest says.
Error ChangedFile(const std::string& folder, const std::string& name, std::string expected, std::string found);

// Whether a path stays in its folder: relative, with forward slashes, no "..", no control characters.
bool IsInside(std::string_view path);

// As 64 hexadecimal digits.
std::string Sha256(std::string_view data);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_BUNDLE_FILE_H_
