// Streams over bytes in memory.
#ifndef TVM_SUPPORT_BYTES_IO_H_
#define TVM_SUPPORT_BYTES_IO_H_

#include <tvm/support/io.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace tvm {
namespace support {

// Reads bytes that stay the caller's.
class BytesInStream : public Stream {
 public:
  using Stream::Read;
  using Stream::Write;

  explicit BytesInStream(const std::string& bytes) : data_(bytes.data()), left_(bytes.size()) {}
  explicit BytesInStream(const ffi::Bytes& bytes) : data_(bytes.data()), left_(bytes.size()) {}

  size_t Read(void* data, size_t size) final {
    size_t count = std::min(size, left_);
    if (count != 0) std::memcpy(data, data_, count);
    data_ += count;
    left_ -= count;
    return count;
  }

  size_t Write(const void*, size_t) final {
    TVM_FFI_THROW(InternalError) << "BytesInStream is read-only";
  }

 private:
  const char* data_;
  size_t left_;
};

// Appends to a string.
class BytesOutStream : public Stream {
 public:
  using Stream::Read;
  using Stream::Write;

  explicit BytesOutStream(std::string* bytes) : bytes_(bytes) {}

  size_t Read(void*, size_t) final {
    TVM_FFI_THROW(InternalError) << "BytesOutStream is write-only";
  }

  size_t Write(const void* data, size_t size) final {
    bytes_->append(static_cast<const char*>(data), size);
    return size;
  }

 private:
  std::string* bytes_;
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_BYTES_IO_H_
