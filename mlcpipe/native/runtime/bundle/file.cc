#include "file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mlcpipe {
namespace {

// Closes itself.
struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

}  // namespace

Error ChangedFile(const std::string& folder, const std::string& name, std::string expected, std::string found) {
  return Error(Code::kBundle, "the bundle's file " + name + " has changed since it was compiled")
      .Where(folder)
      .Expected(std::move(expected))
      .Found(std::move(found))
      .Next("compile the model again");
}

std::shared_ptr<const MappedFile> MappedFile::Open(const std::string& folder, const std::string& name,
                                                   uint64_t max_bytes) {
  // A pipe would wait for its writer.
  Descriptor file{open((folder + "/" + name).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat status;
  if (file.number < 0 || fstat(file.number, &status) != 0) {
    throw ChangedFile(folder, name, "a file that can be read", std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) throw ChangedFile(folder, name, "a regular file", "another kind of file");
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes > max_bytes) {
    throw ChangedFile(folder, name, "at most " + std::to_string(max_bytes) + " bytes", std::to_string(bytes));
  }
  void* data = nullptr;
  if (bytes) {
    data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.number, 0);
    if (data == MAP_FAILED) {
      throw Error(Code::kResource, "cannot map " + name)
          .Where(folder)
          .Found(std::strerror(errno))
          .Next("raise the limit on address space (ulimit -v)");
    }
  }
  return std::shared_ptr<const MappedFile>(new MappedFile(static_cast<const uint8_t*>(data), bytes));
}

MappedFile::~MappedFile() {
  if (bytes_) munmap(const_cast<uint8_t*>(data_), bytes_);
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
