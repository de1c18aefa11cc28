#include "atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace mlcpipe {
namespace {

// The file that a link leads to.
std::string Resolved(const std::string& path) {
  char resolved[PATH_MAX];
  return realpath(path.c_str(), resolved) ? resolved : path;
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

// Beside it, and of no other program: Python's writers call theirs otherwise.
std::string PartialOf(const std::string& path) {
  const size_t name = path.rfind('/') + 1;
  return path.substr(0, name) + "." + path.substr(name) + ".partial-native";
}

// Bytes that may be written to a folder; all where the system does not say.
uint64_t RoomIn(const std::string& folder) {
  struct statvfs status;
  struct rlimit limit;
  uint64_t room = UINT64_MAX;
  if (statvfs(folder.c_str(), &status) == 0) room = uint64_t{status.f_bavail} * status.f_frsize;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    room = std::min<uint64_t>(room, limit.rlim_cur);
  }
  return room;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path, uint64_t needed_bytes)
    : path_(Resolved(path)), partial_(PartialOf(path_)) {
  if (const uint64_t room = RoomIn(FolderOf(path_)); room < needed_bytes) {
    throw Error(Code::kResource, "not enough space on the disk")
        .Where(path_)
        .Expected(std::to_string(needed_bytes) + " bytes free")
        .Found(std::to_string(room))
        .Next("free space or write to another disk");
  }
  while (!OpenAlone()) {
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  unlink(partial_.c_str());
  close(descriptor_);
}

// False where another writer was done with this file, which is then not beside `path` any more.
bool AtomicFile::OpenAlone() {
  descriptor_ = open(partial_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (descriptor_ < 0) throw Failed(errno);
  struct stat ours, there;
  const bool alone = flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
  const int error = errno;
  const bool same = alone && fstat(descriptor_, &ours) == 0 && stat(partial_.c_str(), &there) == 0 &&
                    ours.st_ino == there.st_ino && ours.st_dev == there.st_dev;
  if (same && ftruncate(descriptor_, 0) == 0) return true;
  const int truncated = errno;
  close(descriptor_);
  descriptor_ = -1;
  if (same) throw Failed(truncated);
  if (alone) return false;
  if (error != EWOULDBLOCK) throw Failed(error);
  throw Error(Code::kUsage, "another run is writing this file").Where(path_).Next("wait for it or stop it");
}

void AtomicFile::Write(const void* data, uint64_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  while (bytes) {
    const ssize_t written = write(descriptor_, from, std::min<uint64_t>(bytes, SSIZE_MAX / 2));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw Failed(errno);
    from += written;
    bytes -= static_cast<uint64_t>(written);
  }
}

MappedFile AtomicFile::Written() const {
  return OpenRegular(partial_, [this](const std::string&, const std::string&) { return Failed(errno); });
}

void AtomicFile::Commit() {
  if (fsync(descriptor_) != 0 || rename(partial_.c_str(), path_.c_str()) != 0) throw Failed(errno);
  close(descriptor_);
  descriptor_ = -1;
  const int folder = open(FolderOf(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  fsync(folder);
  close(folder);
}

Error AtomicFile::Failed(int error) const {
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return Error(Code::kResource, "the disk is full or refuses a file of this size")
        .Where(path_)
        .Found(std::strerror(error))
        .Next("free space or write to another disk");
  }
  return Error(Code::kUsage, "the chat cannot be saved").Where(path_).Found(std::strerror(error));
}

}  // namespace mlcpipe
