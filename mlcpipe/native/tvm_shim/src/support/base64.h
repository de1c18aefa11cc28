// Base64 (RFC 4648) over another stream.
#ifndef TVM_SUPPORT_BASE64_H_
#define TVM_SUPPORT_BASE64_H_

#include <tvm/support/io.h>

#include <cstring>

namespace tvm {
namespace support {

constexpr char kBase64Alphabet[] =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// Decodes; characters outside the alphabet (line ends) are skipped, '=' ends the data.
class Base64InStream : public Stream {
 public:
  using Stream::Read;
  using Stream::Write;

  explicit Base64InStream(Stream* stream) : stream_(stream) {}

  void InitPosition() {}

  size_t Read(void* data, size_t size) final {
    uint8_t* out = static_cast<uint8_t*>(data);
    size_t done = 0;
    while (done < size) {
      if (bit_count_ < 8) {
        int code = NextCode();
        if (code < 0) break;
        bits_ = (bits_ << 6) | static_cast<uint32_t>(code);
        bit_count_ += 6;
      } else {
        bit_count_ -= 8;
        out[done++] = static_cast<uint8_t>(bits_ >> bit_count_);
      }
    }
    return done;
  }

  size_t Write(const void*, size_t) final {
    TVM_FFI_THROW(InternalError) << "Base64InStream is read-only";
  }

 private:
  int NextCode() {
    char character = 0;
    while (stream_->Read(static_cast<void*>(&character), 1) == 1 && character != '=') {
      const char* found = character ? std::strchr(kBase64Alphabet, character) : nullptr;
      if (found != nullptr) return static_cast<int>(found - kBase64Alphabet);
    }
    return -1;
  }

  Stream* stream_;
  uint32_t bits_{0};
  int bit_count_{0};
};

// Encodes; `Finish` writes the last characters.
class Base64OutStream : public Stream {
 public:
  using Stream::Read;
  using Stream::Write;

  explicit Base64OutStream(Stream* stream) : stream_(stream) {}

  size_t Read(void*, size_t) final {
    TVM_FFI_THROW(InternalError) << "Base64OutStream is write-only";
  }

  size_t Write(const void* data, size_t size) final {
    const uint8_t* in = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < size; ++i) {
      bits_ = (bits_ << 8) | in[i];
      bit_count_ += 8;
      while (bit_count_ >= 6) {
        bit_count_ -= 6;
        Put(kBase64Alphabet[(bits_ >> bit_count_) & 63]);
      }
    }
    return size;
  }

  void Finish() {
    if (bit_count_ == 0) return;
    Put(kBase64Alphabet[(bits_ << (6 - bit_count_)) & 63]);
    Put('=');
    if (bit_count_ == 2) Put('=');
    bit_count_ = 0;
  }

 private:
  void Put(char character) { stream_->Write(static_cast<const void*>(&character), 1); }

  Stream* stream_;
  uint32_t bits_{0};
  int bit_count_{0};
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_BASE64_H_
