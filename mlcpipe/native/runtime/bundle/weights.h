// The weights of a bundle: views of its mapped files, in the order of the library's arguments.
#ifndef MLCPIPE_RUNTIME_BUNDLE_WEIGHTS_H_
#define MLCPIPE_RUNTIME_BUNDLE_WEIGHTS_H_

#include <tvm/ffi/container/array.h>
#include <tvm/runtime/tensor.h>

#include <string>
#include <vector>

#include "manifest.h"

namespace mlcpipe {

// `tensor-cache.json`, checked: dtypes, shapes, places in the files, and all against the manifest.
class WeightIndex {
 public:
  // Throws kBundle.
  explicit WeightIndex(const Manifest& manifest);

  // Names of the files.
  std::vector<std::string> shards() const;

  // Maps the files. A tensor keeps its file mapped. Throws kBundle, and kResource where the system maps no more.
  tvm::ffi::Array<tvm::runtime::Tensor> Map() const;

 private:
  struct Tensor {
    size_t shard;
    uint64_t offset;
    DLDataType dtype;
    const ParamInfo* param;
  };
  struct Shard {
    std::string name;
    uint64_t bytes;
  };

  void ReadShard(const JsonObject& json);
  void ReadTensor(const JsonObject& json, uint64_t* end);

  const Manifest& manifest_;
  std::vector<Shard> shards_;
  std::vector<Tensor> tensors_;  // as the manifest's parameters
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_BUNDLE_WEIGHTS_H_
