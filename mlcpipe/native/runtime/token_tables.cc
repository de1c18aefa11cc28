#include "token_tables.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tensors.h"

namespace mlcpipe {

using tvm::runtime::Tensor;

TokenTables::TokenTables(const Manifest& manifest, const Device& device, tvm::ffi::Array<Tensor> mapped) {
  for (const size_t gathered : manifest.gathered) {
    const auto place = static_cast<int64_t>(gathered);
    const Tensor all = mapped[place];
    tables_.push_back({place, all, Empty({1, all->shape[1]}, all->dtype), Reused(device)});
    mapped.Set(place, ViewOf(all, {1, all->shape[1]}));
  }
  params_ = device.PutAll(mapped);
}

const tvm::ffi::Array<Tensor>& TokenTables::For(const Tensor& tokens) {
  const int64_t count = tokens->shape[0];
  const int32_t* const ids = Data<int32_t>(tokens);
  for (Table& table : tables_) {
    const auto bytes = tvm::ffi::GetDataSize(static_cast<size_t>(table.all->shape[1]), table.all->dtype);
    if (table.rows->shape[0] != count) table.rows = Empty({count, table.all->shape[1]}, table.all->dtype);
    for (int64_t row = 0; row < count; ++row) {
      const int64_t source = ids[row] < table.all->shape[0] ? ids[row] : 0;
      std::memcpy(Data<char>(table.rows) + static_cast<size_t>(row) * bytes,
                  Data<char>(table.all) + static_cast<size_t>(source) * bytes, bytes);
    }
    params_.Set(table.place, table.on_device.Put(table.rows));
  }
  return params_;
}

}  // namespace mlcpipe
