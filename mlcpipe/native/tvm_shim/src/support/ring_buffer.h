// A queue of bytes, as the RPC endpoint uses it. What was read is dropped now and then, in one move.
#ifndef TVM_SUPPORT_RING_BUFFER_H_
#define TVM_SUPPORT_RING_BUFFER_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace tvm {
namespace support {

class RingBuffer {
 public:
  size_t bytes_available() const { return bytes_.size() - head_; }

  size_t capacity() const { return bytes_.capacity(); }

  void Reserve(size_t size) { bytes_.reserve(head_ + size); }

  // `callback(data, size)` says how many of at most `max` bytes it took.
  template <typename Callback>
  size_t ReadWithCallback(Callback callback, size_t max) {
    size_t taken = callback(bytes_.data() + head_, std::min(max, bytes_available()));
    Drop(taken);
    return taken;
  }

  void Read(void* data, size_t size) {
    TVM_FFI_ICHECK_LE(size, bytes_available()) << "read past the end of the buffer";
    std::memcpy(data, bytes_.data() + head_, size);
    Drop(size);
  }

  // `callback(data, max)` says how many bytes it put there.
  template <typename Callback>
  size_t WriteWithCallback(Callback callback, size_t max) {
    size_t end = bytes_.size();
    bytes_.resize(end + max);
    size_t written = callback(bytes_.data() + end, max);
    bytes_.resize(end + written);
    return written;
  }

  void Write(const void* data, size_t size) {
    const char* from = static_cast<const char*>(data);
    bytes_.insert(bytes_.end(), from, from + size);
  }

 private:
  void Drop(size_t count) {
    constexpr size_t kMove = 1 << 20;
    head_ += count;
    if (head_ == bytes_.size() || head_ > kMove) {
      bytes_.erase(bytes_.begin(), bytes_.begin() + head_);
      head_ = 0;
    }
  }

  std::vector<char> bytes_;
  size_t head_{0};
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_RING_BUFFER_H_
