// Tensors of the host.
#ifndef MLCPIPE_RUNTIME_TENSORS_H_
#define MLCPIPE_RUNTIME_TENSORS_H_

#include <tvm/runtime/tensor.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <vector>

namespace mlcpipe {

constexpr DLDataType kInt8{kDLInt, 8, 1}, kInt32{kDLInt, 32, 1}, kFloat32{kDLFloat, 32, 1};

// Its numbers are anything.
inline tvm::runtime::Tensor Empty(std::initializer_list<int64_t> shape, DLDataType dtype) {
  return tvm::runtime::Tensor::Empty(tvm::ffi::Shape(shape), dtype, DLDevice{kDLCPU, 0});
}

template <typename T>
T* Data(const tvm::runtime::Tensor& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor->data) + tensor->byte_offset);
}

// A copy of numbers, n of them in [n].
template <typename T>
tvm::runtime::Tensor Filled(const std::vector<T>& values, DLDataType dtype) {
  tvm::runtime::Tensor tensor = Empty({static_cast<int64_t>(values.size())}, dtype);
  std::memcpy(tensor->data, values.data(), values.size() * sizeof(T));
  return tensor;
}

// Changes how many rows a tensor says that it has, of those that there is memory for. There must be no other owner.
inline void SetRows(const tvm::runtime::Tensor& tensor, int64_t rows) { tensor->shape[0] = rows; }

// Integers that each step replaces: one tensor of the host, which grows where there are more of them.
class Numbers {
 public:
  // Valid until the next call.
  const tvm::runtime::Tensor& Fill(const std::vector<int32_t>& values) {
    const auto count = static_cast<int64_t>(values.size());
    while (room_ < count) room_ *= 2;
    if (!data_.defined() || room_ > made_) data_ = Empty({room_}, kInt32);
    made_ = room_;
    SetRows(data_, count);
    std::copy(values.begin(), values.end(), Data<int32_t>(data_));
    return data_;
  }

 private:
  tvm::runtime::Tensor data_;
  int64_t room_ = 64, made_ = 0;
};

// The first numbers of a tensor in another shape.
inline tvm::runtime::Tensor ViewOf(const tvm::runtime::Tensor& tensor, std::initializer_list<int64_t> shape) {
  return tensor.CreateView(tvm::ffi::Shape(shape), tensor->dtype);
}

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TENSORS_H_
