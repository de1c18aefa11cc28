#include "device.h"

#include <tvm/ffi/function.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "gpu_check.h"
#include "metal.h"
#include "vulkan.h"

namespace mlcpipe {
namespace {

using tvm::runtime::Tensor;

// Bytes of a tensor, or of the host.
struct Bytes {
  int64_t count;
  DLTensor tensor;

  Bytes(void* data, DLDevice device, size_t offset, size_t bytes)
      : count(static_cast<int64_t>(bytes)), tensor{data, device, 1, {kDLInt, 8, 1}, &count, nullptr, offset} {}
  Bytes(const Tensor& of, size_t offset, size_t bytes) : Bytes(of->data, of->device, of->byte_offset + offset, bytes) {}
  Bytes(const Bytes&) = delete;
};

constexpr DLDevice kHost{kDLCPU, 0};

struct Kind {
  const char* name;
  const Gpu& (*gpu)();
};

constexpr char kHostKind[] = "cpu";
constexpr Kind kGpus[] = {{"vulkan", Vulkan}, {"metal", Metal}};

int64_t GpuFreeBytes(DLDevice device) {
  tvm::ffi::Any bytes;
  tvm::runtime::DeviceAPI::Get(device)->GetAttr(device, tvm::runtime::kAvailableGlobalMemory, &bytes);
  return bytes.cast<int64_t>();
}

}  // namespace

void CopyBytes(const Tensor& from, size_t from_offset, const Tensor& to, size_t to_offset, size_t bytes) {
  Bytes source(from, from_offset, bytes), target(to, to_offset, bytes);
  Tensor::CopyFromTo(&source.tensor, &target.tensor);
}

void CopyIn(const void* from, const Tensor& to, size_t offset, size_t bytes) {
  Bytes source(const_cast<void*>(from), kHost, 0, bytes), target(to, offset, bytes);
  Tensor::CopyFromTo(&source.tensor, &target.tensor);
}

void CopyOut(const Tensor& from, size_t offset, void* to, size_t bytes) {
  Bytes source(from, offset, bytes), target(to, kHost, 0, bytes);
  Tensor::CopyFromTo(&source.tensor, &target.tensor);
}

FreeMemory Device::Free() const {
  if (on_host()) return FindFreeMemory();
  const FreeMemory own{GpuFreeBytes(handle), title};
  if (!unified_memory) return own;
  const FreeMemory host = FindFreeMemory();
  return host.bytes < own.bytes ? host : own;
}

Tensor Device::Empty(tvm::ffi::Shape shape, DLDataType dtype) const { return Tensor::Empty(shape, dtype, handle); }

Tensor Device::Put(const Tensor& host) const {
  if (on_host()) return host;
  Tensor made = Empty(tvm::ffi::Shape(host.Shape()), host->dtype);
  made.CopyFrom(host);
  return made;
}

tvm::ffi::Array<Tensor> Device::PutAll(const tvm::ffi::Array<Tensor>& host) const {
  if (on_host()) return host;
  tvm::ffi::Array<Tensor> made;
  for (const Tensor& one : host) {
    const auto bytes = static_cast<int64_t>(tvm::ffi::GetDataSize(*one.operator->()));
    if (bytes > max_tensor_bytes) {
      throw Error(Code::kResource, "a weight is larger than " + title + " takes")
          .Expected("at most " + SizeWords(max_tensor_bytes))
          .Found(SizeWords(bytes))
          .Next("compile the model with --target cpu");
    }
    made.push_back(Put(one));
  }
  return made;
}

void Device::Trim() const {
  if (gpu) gpu->Trim();
}

void Device::Wait() const {
  if (!on_host()) tvm::runtime::DeviceAPI::Get(handle)->StreamSync(handle, nullptr);
}

Prepared::Prepared(const Device& device, tvm::ffi::Module library, const std::string& cache)
    : device_(device), library_(std::move(library)) {
  if (!device_.gpu) return;
  CheckDriver(device_, library_, cache);
  device_.gpu->Prepare(device_, library_, cache);
}

Prepared::~Prepared() {
  if (device_.gpu) device_.gpu->Release(device_, library_);
}

const Tensor& Reused::Put(const Tensor& host) {
  if (device_->on_host()) return view_ = host;
  const int64_t rows = host->shape[0], count = host.Shape().Product();
  if (!whole_.defined() || whole_->shape[0] < count) {
    int64_t room = 64;
    while (room < count) room *= 2;
    whole_ = device_->Empty({room}, host->dtype);
    view_ = Tensor();
  }
  if (!view_.defined() || view_->shape[0] != rows) view_ = whole_.CreateView(tvm::ffi::Shape(host.Shape()), host->dtype);
  view_.CopyFrom(host);
  return view_;
}

Error NotBuilt(const std::string& title, const std::string& option) {
  return Error(Code::kTarget, "the bundle was made for " + title)
      .Expected("a runtime that was built with " + option)
      .Next("build it so, or compile the model for a CPU");
}

std::string Kinds() {
  std::string names = kHostKind;
  for (const Kind& one : kGpus) names += std::string(", ") + one.name;
  return names;
}

bool IsKind(std::string_view kind) {
  const auto same = [&](const Kind& one) { return kind == one.name; };
  return kind == kHostKind || std::any_of(std::begin(kGpus), std::end(kGpus), same);
}

Device FindDevice(const std::string& kind, const std::string& cache) {
  for (const Kind& one : kGpus) {
    if (kind == one.name) return one.gpu().Find(cache);
  }
  if (kind == kHostKind) return Device();
  throw Error(Code::kTarget, "the bundle was made for another kind of device")
      .Expected("code for one of " + Kinds())
      .Found(kind)
      .Next("compile the model with --target cpu");
}

}  // namespace mlcpipe
