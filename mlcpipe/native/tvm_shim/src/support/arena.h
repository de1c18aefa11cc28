// Memory for plain values that is freed all at once.
#ifndef TVM_SUPPORT_ARENA_H_
#define TVM_SUPPORT_ARENA_H_

#include <cstddef>
#include <memory>
#include <vector>

namespace tvm {
namespace support {

class Arena {
 public:
  // Room for `count` values, not initialized.
  template <typename T>
  T* allocate_(int count = 1) {
    size_t words = (sizeof(T) * count + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
    blocks_.emplace_back(new std::max_align_t[words + 1]);
    return reinterpret_cast<T*>(blocks_.back().get());
  }

  void RecycleAll() { blocks_.clear(); }

 private:
  std::vector<std::unique_ptr<std::max_align_t[]>> blocks_;
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_ARENA_H_
