#include "files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>

#include "../tables.h"

namespace mlcpipe {

// A part of a file in memory.
class Mapping {
 public:
  // Throws kResource.
  Mapping(int descriptor, uint64_t offset, uint64_t bytes, const std::string& name) {
    if (!bytes) return;
    const uint64_t before = offset % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    bytes_ = before + bytes;
    begin_ = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, descriptor, static_cast<off_t>(offset - before));
    if (begin_ == MAP_FAILED) {
      bytes_ = 0;
      throw Error(Code::kResource, "cannot map " + name)
          .Found(std::strerror(errno))
          .Next("raise the limit on address space (ulimit -v)");
    }
#if defined(MADV_HUGEPAGE)
    madvise(begin_, bytes_, MADV_HUGEPAGE);  // where the system can, what is read from now on comes in pages of 2 MB
#endif
    data_ = static_cast<const uint8_t*>(begin_) + before;
  }
  ~Mapping() {
    if (bytes_) munmap(begin_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const uint8_t* data() const { return data_; }

 private:
  void* begin_ = nullptr;
  uint64_t bytes_ = 0;
  const uint8_t* data_ = nullptr;
};

namespace {

// Closes itself.
struct Descriptor {
  int number;

  // A pipe would wait for its writer.
  explicit Descriptor(const std::string& path) : number(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

class Folder : public Files {
 public:
  explicit Folder(const std::string& path) : Files(path) {}

  MappedFile Open(const std::string& name, uint64_t max_bytes) const override {
    return OpenRegular(where() + "/" + name, [&](std::string e, std::string f) { return Changed(name, e, f); }, max_bytes);
  }

  bool Has(const std::string& name) const override { return access((where() + "/" + name).c_str(), F_OK) == 0; }

  bool HasCode() const override { return true; }
};

constexpr char kMagic[] = "mlcpipe\x01";
constexpr uint32_t kVersion = 1, kSections = 4;
constexpr uint64_t kMaxListBytes = 16 << 20;

class Container : public Files {
 public:
  // It ends where the `bytes` from `offset` on end.
  Container(int descriptor, uint64_t offset, uint64_t bytes, const std::string& name) : Files(name) {
    struct stat status;
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) throw Damaged("a regular file");
    const auto size = static_cast<uint64_t>(status.st_size);
    if (offset > size || bytes > size - offset) throw Damaged("a part of the file").Found(std::to_string(size) + " bytes");
    Trailer trailer;
    if (bytes < sizeof trailer) throw Damaged("a container of mlcpipe").Found(std::to_string(bytes) + " bytes");
    mapping_ = std::make_shared<const Mapping>(descriptor, offset, bytes, name);
    std::memcpy(&trailer, mapping_->data() + bytes - sizeof trailer, sizeof trailer);
    if (std::memcmp(trailer.magic, kMagic, sizeof trailer.magic) != 0) {
      throw Damaged("a container of mlcpipe at its end").Next("make one with: mlcpipe package BUNDLE --app weights");
    }
    if (trailer.bytes > bytes || trailer.bytes < sizeof trailer) throw Damaged("the container's begin in the file");
    begin_ = mapping_->data() + (bytes - trailer.bytes);
    end_ = trailer.bytes - sizeof trailer;
    if (reinterpret_cast<uintptr_t>(begin_) % kAlignment) throw Damaged("a place at a multiple of 64 bytes");
    ReadIndex(trailer);
  }

  MappedFile Open(const std::string& name, uint64_t max_bytes) const override {
    const auto found = places_.find(name);
    if (found == places_.end()) throw Changed(name, "a file of the container", "none");
    const Place& place = found->second;
    if (place.bytes > max_bytes) {
      throw Changed(name, "at most " + std::to_string(max_bytes) + " bytes", std::to_string(place.bytes));
    }
    return {mapping_, begin_ + place.offset, place.bytes};
  }

  bool Has(const std::string& name) const override { return places_.count(name) != 0; }

  bool HasCode() const override { return false; }

 private:
  struct Trailer {
    char magic[8];
    uint64_t bytes, index, index_bytes;
    char index_sha256[64];
  };
  struct Place {
    uint64_t offset, bytes;
  };
  static constexpr uint64_t kAlignment = 64;

  std::shared_ptr<const Mapping> mapping_;
  const uint8_t* begin_ = nullptr;
  uint64_t end_ = 0;  // of files and index
  std::map<std::string, Place> places_;

  Error Damaged(std::string expected) const {
    return Error(Code::kBundle, "no model in the file").Where(where()).Expected(std::move(expected));
  }

  void ReadIndex(const Trailer& trailer) {
    const uint64_t bytes = trailer.index_bytes;
    if (trailer.index > end_ || bytes != end_ - trailer.index || bytes > kMaxListBytes) {
      throw Damaged("its index before its end");
    }
    const std::string_view index(reinterpret_cast<const char*>(begin_ + trailer.index), bytes);
    if (Sha256(index) != std::string_view(trailer.index_sha256, sizeof trailer.index_sha256)) {
      throw Damaged("the index that was written").Next("copy the file again");
    }
    const Tables tables(index.data(), index.size(), "mlcfiles", kVersion, kSections, Code::kBundle);
    const View<uint32_t> ends = tables.ends(0, 1);
    const View<char> text = tables.array<char>(1), sha256 = tables.array<char>(3);
    const View<Place> places = tables.array<Place>(2);
    std::string others;  // manifests for other architectures
    if (places.size != ends.size) throw Damaged("a place for each file");
    for (size_t i = 0; i < ends.size; ++i) {
      const std::string name(StringAt(ends, text, i));
      if (!IsInside(name)) throw Damaged("names of files without '..'").Found(name);
      const Place& place = places[i];
      if (place.offset % kAlignment || place.offset > trailer.index || place.bytes > trailer.index - place.offset) {
        throw Damaged("its files before its index").Found(name);
      }
      places_[name] = place;
      if (name.rfind("mlcpipe-", 0) == 0) others += Open(name, UINT64_MAX).text();
    }
    const std::string manifests = std::string(Open("mlcpipe.json", UINT64_MAX).text()) + others;
    if (Sha256(manifests) != std::string_view(sha256.data, sha256.size)) {
      throw Damaged("the manifest that was written").Next("copy the file again");
    }
  }
};

}  // namespace

MappedFile OpenRegular(const std::string& path, const std::function<Error(std::string, std::string)>& refused,
                       uint64_t max_bytes) {
  const Descriptor file(path);
  struct stat status;
  if (file.number < 0 || fstat(file.number, &status) != 0) throw refused("a file that can be read", std::strerror(errno));
  if (!S_ISREG(status.st_mode)) throw refused("a regular file", "another kind of file");
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes > max_bytes) throw refused("at most " + std::to_string(max_bytes) + " bytes", std::to_string(bytes));
  auto mapping = std::make_shared<const Mapping>(file.number, 0, bytes, path);
  const uint8_t* data = mapping->data();
  return {std::move(mapping), data, bytes};
}

std::unique_ptr<const Files> Files::At(const std::string& path) {
  const Descriptor file(path);
  struct stat status;
  if (file.number < 0 || fstat(file.number, &status) != 0) {
    throw Error(Code::kBundle, "no bundle").Where(path).Found(std::strerror(errno));
  }
  if (S_ISDIR(status.st_mode)) return std::make_unique<const Folder>(path);
  return std::make_unique<const Container>(file.number, 0, static_cast<uint64_t>(status.st_size), path);
}

std::unique_ptr<const Files> Files::In(int descriptor, uint64_t offset, uint64_t bytes) {
  return std::make_unique<const Container>(descriptor, offset, bytes, "file " + std::to_string(descriptor));
}

Error Files::Changed(const std::string& name, std::string expected, std::string found) const {
  return Error(Code::kBundle, "the bundle's file " + name + " has changed since it was compiled")
      .Where(where_)
      .Expected(std::move(expected))
      .Found(std::move(found))
      .Next("compile the model again");
}

bool IsInside(std::string_view path) {
  if (path.empty() || path.size() > 500) return false;
  for (unsigned char c : path) {
    if (c < 32 || c == 127 || c == '\\' || c == ':') return false;
  }
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return true;
}

}  // namespace mlcpipe
