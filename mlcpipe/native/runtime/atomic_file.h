// A file that is written as a whole or not at all (mlcpipe/support/atomic.py).
#ifndef MLCPIPE_RUNTIME_ATOMIC_FILE_H_
#define MLCPIPE_RUNTIME_ATOMIC_FILE_H_

#include <cstdint>
#include <string>

#include "bundle/files.h"

namespace mlcpipe {

class AtomicFile {
 public:
  // An empty file beside `path`. Throws kUsage where it cannot be made or another writer is at it, kResource where the
  // disk has less than `needed_bytes`.
  AtomicFile(const std::string& path, uint64_t needed_bytes);
  // Removes the file unless it was committed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Throws kResource where the disk is full, kUsage where the system refuses.
  void Write(const void* data, uint64_t bytes);

  // The bytes written so far, mapped.
  MappedFile Written() const;

  // Makes it `path`, once the disk has it: a reader sees the old content or the new. Throws as `Write`.
  void Commit();

 private:
  const std::string path_, partial_;
  int descriptor_ = -1;

  bool OpenAlone();
  Error Failed(int error) const;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_ATOMIC_FILE_H_
