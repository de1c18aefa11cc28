// A byte stream that typed values are written to and read from; serializer.h has the format.
#ifndef TVM_SUPPORT_IO_H_
#define TVM_SUPPORT_IO_H_

#include <cstddef>
#include <cstdint>

namespace tvm {
namespace support {

class Stream {
 public:
  virtual ~Stream() = default;

  // Bytes that were read: fewer than `size` at the end of the stream.
  virtual size_t Read(void* data, size_t size) = 0;
  // Bytes that were written.
  virtual size_t Write(const void* data, size_t size) = 0;

  template <typename T>
  void Write(const T& value);
  // False at the end of the stream.
  template <typename T>
  bool Read(T* value);
  // `count` values without their number.
  template <typename T>
  void WriteArray(const T* values, size_t count);
  template <typename T>
  bool ReadArray(T* values, size_t count);
};

}  // namespace support
}  // namespace tvm

#include <tvm/support/serializer.h>

#endif  // TVM_SUPPORT_IO_H_
