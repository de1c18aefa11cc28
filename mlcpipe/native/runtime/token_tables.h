// Tables that stay in the mapped file of a GPU's bundle: the host gathers the rows of a forward's tokens
// (mlcpipe/runtime/serving/token_tables.py).
#ifndef MLCPIPE_RUNTIME_TOKEN_TABLES_H_
#define MLCPIPE_RUNTIME_TOKEN_TABLES_H_

#include <tvm/ffi/container/array.h>

#include <vector>

#include "bundle/manifest.h"
#include "device.h"

namespace mlcpipe {

// The weights of forwards.
class TokenTables {
 public:
  // Copies weights, which are mapped, to the device; all but the tables. Throws as `Device::PutAll`.
  TokenTables(const Manifest& manifest, const Device& device, tvm::ffi::Array<tvm::runtime::Tensor> mapped);

  // The weights for a forward of tokens i32[n] of the host, valid until the next call.
  const tvm::ffi::Array<tvm::runtime::Tensor>& For(const tvm::runtime::Tensor& tokens);
  // The weights for functions without tables.
  const tvm::ffi::Array<tvm::runtime::Tensor>& all() const { return params_; }

 private:
  struct Table {
    int64_t place;
    tvm::runtime::Tensor all, rows;  // mapped; those of the last tokens
    Reused on_device;
  };

  tvm::ffi::Array<tvm::runtime::Tensor> params_;
  std::vector<Table> tables_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_TOKEN_TABLES_H_
