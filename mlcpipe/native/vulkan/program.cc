// Turns TVM's packed arguments into a launch without allocations, look-ups by name, or locks except the device's.
#include <algorithm>
#include <cstring>

#include "error.h"
#include "instance.h"
#include "module.h"

namespace mlcpipe::vulkan {
namespace {

double ToDouble(const TVMFFIAny& value) {
  return value.type_index == TVMFFITypeIndex::kTVMFFIFloat ? value.v_float64 : static_cast<double>(value.v_int64);
}

bool IsNumber(const TVMFFIAny& value) {
  return value.type_index == TVMFFITypeIndex::kTVMFFIInt || value.type_index == TVMFFITypeIndex::kTVMFFIFloat ||
         value.type_index == TVMFFITypeIndex::kTVMFFIBool;
}

}  // namespace

int& CurrentDevice() {
  thread_local int index = 0;
  return index;
}

Program::Program(Kernel kernel)
    : kernel_(std::move(kernel)), pipelines_(std::max<size_t>(Instance::Get().usable_count(), 1)) {
  for (const BufferArgument& buffer : kernel_.buffers) writes_.push_back(buffer.write);
}

Program::~Program() {
  for (std::atomic<Pipeline*>& pipeline : pipelines_) {
    if (pipeline.load() != nullptr) Device::DestroyPipeline(pipeline.load());
  }
  for (Pipeline* pipeline : outdated_) Device::DestroyPipeline(pipeline);
}

void Program::Refuse(const std::string& what) const { Fail("kernel " + kernel_.name + " " + what); }

void Program::CheckDevice(const Device& device) const {
  const Adapter& adapter = device.adapter();
  const VkPhysicalDeviceLimits& limits = adapter.limits();
  const std::string here = " on " + adapter.title();
  for (const std::string& feature : kernel_.features) {
    if (adapter.features().count(feature) == 0) {
      Refuse("needs " + feature + ", which is missing" + here + "; compile the model for this device");
    }
  }
  uint32_t threads = 1;
  for (int i = 0; i < 3; ++i) {
    threads *= kernel_.workgroup[i];
    if (kernel_.workgroup[i] > limits.maxComputeWorkGroupSize[i]) threads = UINT32_MAX / 4096;
  }
  auto at_most = [&](uint64_t needs, uint64_t most, const char* of) {
    if (needs > most) {
      Refuse("needs " + std::to_string(needs) + " " + of + ", at most " + std::to_string(most) + " are allowed" +
             here + "; compile the model for this device");
    }
  };
  at_most(threads, limits.maxComputeWorkGroupInvocations, "threads in a workgroup of this shape");
  at_most(kernel_.shared_bytes, limits.maxComputeSharedMemorySize, "bytes of shared memory");
  at_most(kernel_.push_bytes, limits.maxPushConstantsSize, "bytes of push constants");
  at_most(kernel_.buffers.size(),
          std::min(limits.maxPerStageDescriptorStorageBuffers, limits.maxDescriptorSetStorageBuffers), "buffers");
  const uint32_t size = kernel_.subgroup_size;
  if (size == 0) return;
  const bool required = adapter.can_require_subgroup_size() && size >= adapter.min_subgroup_size() &&
                        size <= adapter.max_subgroup_size();
  const bool natural = adapter.min_subgroup_size() == adapter.max_subgroup_size() && adapter.v11().subgroupSize == size;
  if (!required && !natural) {
    Refuse("needs subgroups of " + std::to_string(size) + ", which are not available" + here +
           "; compile the model for this device");
  }
}

Pipeline* Program::For(int index, Device* device) {
  std::atomic<Pipeline*>& slot = pipelines_[index];
  Pipeline* pipeline = slot.load(std::memory_order_acquire);
  if (pipeline != nullptr && pipeline->device.get() == device) return pipeline;
  std::lock_guard<std::mutex> lock(mutex_);
  pipeline = slot.load(std::memory_order_acquire);
  if (pipeline != nullptr && pipeline->device.get() == device) return pipeline;
  CheckDevice(*device);
  PipelineSpec spec{kernel_.name, kernel_.entry, kernel_.code, kernel_.code_bytes,
                    static_cast<uint32_t>(kernel_.buffers.size()), kernel_.push_bytes, kernel_.subgroup_size,
                    kernel_.full_subgroups};
  Pipeline* created = device->MakePipeline(spec).release();
  if (pipeline != nullptr) outdated_.push_back(pipeline);
  slot.store(created, std::memory_order_release);
  return created;
}

void Program::Release(int index) noexcept {
  Pipeline* pipeline = pipelines_[index].exchange(nullptr, std::memory_order_acq_rel);
  if (pipeline != nullptr) Device::DestroyPipeline(pipeline);
}

void Program::ReadBuffers(const TVMFFIAny* arguments, Device* device, Buffer** buffers) const {
  for (size_t i = 0; i < kernel_.buffers.size(); ++i) {
    const TVMFFIAny& argument = arguments[kernel_.buffers[i].position];
    void* data = nullptr;
    if (argument.type_index == TVMFFITypeIndex::kTVMFFIOpaquePtr) {
      data = argument.v_ptr;
    } else if (argument.type_index == TVMFFITypeIndex::kTVMFFIDLTensorPtr ||
               argument.type_index == TVMFFITypeIndex::kTVMFFITensor) {
      const DLTensor* tensor = argument.type_index == TVMFFITypeIndex::kTVMFFIDLTensorPtr
                                   ? static_cast<const DLTensor*>(argument.v_ptr)
                                   : TVMFFITensorGetDLTensorPtr(argument.v_obj);
      if (tensor->device.device_type != kDLVulkan) Refuse("got a tensor that is not on Vulkan");
      if (tensor->byte_offset != 0) Refuse("got a tensor that starts inside its buffer");
      data = tensor->data;
    }
    if (data == nullptr) Refuse("got no buffer as argument " + std::to_string(kernel_.buffers[i].position));
    buffers[i] = static_cast<Buffer*>(data);
    if (buffers[i]->owner == device) continue;
    if (buffers[i]->owner->lost()) Refuse("got a tensor of a device that was lost; load the model again");
    Refuse("got a tensor that lies on another device, " + buffers[i]->owner->adapter().title());
  }
}

void Program::ReadScalars(const TVMFFIAny* arguments, char* push) const {
  for (const ScalarArgument& scalar : kernel_.scalars) {
    const TVMFFIAny& value = arguments[scalar.position];
    if (!IsNumber(value)) Refuse("got no number as argument " + std::to_string(scalar.position));
    const bool is_float = value.type_index == TVMFFITypeIndex::kTVMFFIFloat;
    char* to = push + scalar.offset;
    if (scalar.type == ScalarType::kF32) {
      const float number = static_cast<float>(ToDouble(value));
      std::memcpy(to, &number, sizeof number);
    } else if (scalar.type == ScalarType::kF64) {
      const double number = ToDouble(value);
      std::memcpy(to, &number, sizeof number);
    } else {
      if (is_float) Refuse("got a float where it takes an integer");
      const int64_t number = value.v_int64;
      const bool narrow = ScalarBytes(scalar.type) == 4;
      const int64_t most = scalar.type == ScalarType::kI32 ? INT32_MAX : UINT32_MAX;
      if (narrow && (number < INT32_MIN || number > most)) {
        Refuse("takes 32 bits, got " + std::to_string(number) + " as argument " + std::to_string(scalar.position));
      }
      std::memcpy(to, &number, narrow ? 4 : 8);  // little-endian: the low bytes
    }
  }
}

bool Program::ReadExtents(const TVMFFIAny* extents, const VkPhysicalDeviceLimits& limits, uint32_t* groups) const {
  int64_t extent[6] = {1, 1, 1, 1, 1, 1};
  for (size_t i = 0; i < kernel_.launch.size(); ++i) {
    if (extents[i].type_index != TVMFFITypeIndex::kTVMFFIInt) Refuse("got no integer as an extent");
    extent[kernel_.launch[i]] = extents[i].v_int64;
  }
  for (int i = 0; i < 3; ++i) {
    if (extent[i] == 0) return false;  // a dynamic dimension is 0
    if (extent[i] < 0 || extent[i] > UINT32_MAX) Refuse("has an impossible extent, " + std::to_string(extent[i]));
    if (extent[3 + i] != kernel_.workgroup[i]) {
      Refuse("was compiled for another workgroup: " + std::to_string(extent[3 + i]) + " threads, not " +
             std::to_string(kernel_.workgroup[i]));
    }
  }
  for (int i = 0; i < 3; ++i) {
    const bool in_parts = i == 0 && kernel_.grid_base_offset >= 0;
    if (!in_parts && extent[i] > limits.maxComputeWorkGroupCount[i]) {
      Refuse("needs " + std::to_string(extent[i]) + " workgroups along " + "xyz"[i] + ", at most " +
             std::to_string(limits.maxComputeWorkGroupCount[i]) + " are allowed; use a shorter prefill chunk");
    }
    groups[i] = static_cast<uint32_t>(extent[i]);
  }
  return true;
}

void Program::Call(tvm::ffi::PackedArgs arguments) {
  const auto* values = reinterpret_cast<const TVMFFIAny*>(arguments.data());
  if (static_cast<size_t>(arguments.size()) != kernel_.argument_count + kernel_.launch.size()) {
    Refuse("takes " + std::to_string(kernel_.argument_count + kernel_.launch.size()) + " arguments, got " +
           std::to_string(arguments.size()));
  }
  const int index = CurrentDevice();
  Device* device = Device::Get(index);
  Launch launch{};
  alignas(8) char push[kMaxPushBytes];
  std::memset(push, 0, kernel_.push_bytes);
  if (!ReadExtents(values + kernel_.argument_count, device->adapter().limits(), launch.groups)) return;
  Buffer* buffers[Commands::kMaxBuffers];
  ReadBuffers(values, device, buffers);
  ReadScalars(values, push);
  launch.pipeline = For(index, device);
  launch.buffers = buffers;
  launch.writes = writes_.data();
  launch.push_constants = push;
  launch.grid_base_offset = kernel_.grid_base_offset;
  device->Dispatch(launch);
}

}  // namespace mlcpipe::vulkan
