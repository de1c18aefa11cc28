// The files of a bundle: of a folder, or of a container. Mapped read-only, so that what is not touched takes no memory.
#ifndef MLCPIPE_RUNTIME_BUNDLE_FILES_H_
#define MLCPIPE_RUNTIME_BUNDLE_FILES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "../error.h"

namespace mlcpipe {

// Never truncate a file that is mapped: the next access raises SIGBUS. Replace a bundle by renaming.
class Mapping;

// It stays mapped as long as this, or a copy of it, is there.
class MappedFile {
 public:
  MappedFile(std::shared_ptr<const Mapping> mapping, const uint8_t* data, uint64_t bytes)
      : mapping_(std::move(mapping)), data_(data), bytes_(bytes) {}

  const uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), static_cast<size_t>(bytes_)}; }

 private:
  std::shared_ptr<const Mapping> mapping_;
  const uint8_t* data_;
  uint64_t bytes_;
};

// Maps a regular file. Throws what `refused` makes of what was expected and found for one that cannot be read or has more
// than `max_bytes`, kResource where the system maps no more.
MappedFile OpenRegular(const std::string& path, const std::function<Error(std::string, std::string)>& refused,
                       uint64_t max_bytes = UINT64_MAX);

class Files {
 public:
  // A folder, or a file that ends with a container (mlcpipe/compiler/container.py). Throws kBundle, and kResource where
  // the system maps no more.
  static std::unique_ptr<const Files> At(const std::string& path);
  // A container in an open file, such as an app's package; the descriptor is not needed afterwards.
  static std::unique_ptr<const Files> In(int descriptor, uint64_t offset, uint64_t bytes);

  virtual ~Files() = default;

  // Throws kBundle for a file that is not there, cannot be read or is not regular or longer than `max_bytes`, kResource
  // where the system maps no more.
  virtual MappedFile Open(const std::string& name, uint64_t max_bytes = UINT64_MAX) const = 0;

  virtual bool Has(const std::string& name) const = 0;

  // Whether the bundle's libraries are there: a container has data only.
  virtual bool HasCode() const = 0;

  // The error for a file that is not what the manifest says.
  Error Changed(const std::string& name, std::string expected, std::string found) const;

  const std::string& where() const { return where_; }

 protected:
  explicit Files(std::string where) : where_(std::move(where)) {}

 private:
  std::string where_;
};

// Whether a path stays in its folder: relative, with forward slashes, no "..", no control characters.
bool IsInside(std::string_view path);

// As 64 hexadecimal digits.
std::string Sha256(std::string_view data);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_BUNDLE_FILES_H_
