#include "module.h"

#include <tvm/ffi/cast.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <optional>
#include <system_error>
#include <thread>

#include "error.h"
#include "instance.h"

namespace mlcpipe::vulkan {

namespace ffi = tvm::ffi;

VulkanModule::VulkanModule(const ffi::Bytes& bytes)
    : bytes_((bytes.size() + 7) / 8), size_(bytes.size()), users_(Instance::Get().usable_count()) {
  std::memcpy(bytes_.data(), bytes.data(), size_);
  for (Kernel& kernel : ReadKernels(reinterpret_cast<const char*>(bytes_.data()), size_)) {
    std::string name = kernel.name;
    programs_.emplace(std::move(name), std::make_unique<Program>(std::move(kernel)));
  }
}

VulkanModule::~VulkanModule() {
  for (const std::shared_ptr<Device>& device : Device::AllOpen()) device->Trim();
}

int VulkanModule::GetPropertyMask() const { return ffi::Module::kBinarySerializable | ffi::Module::kRunnable; }

ffi::Bytes VulkanModule::SaveToBytes() const {
  return ffi::Bytes(reinterpret_cast<const char*>(bytes_.data()), size_);
}

ffi::String VulkanModule::InspectSource(const ffi::String&) const {
  return ffi::String(reinterpret_cast<const char*>(bytes_.data() + 1), bytes_[0]);
}

ffi::Optional<ffi::Function> VulkanModule::GetFunction(const ffi::String& name) {
  auto found = programs_.find(std::string(name.data(), name.size()));
  if (found == programs_.end()) return std::nullopt;
  Program* program = found->second.get();
  // The function keeps the module alive, and with it the program.
  return ffi::Function::FromPacked([program, module = ffi::GetRef<ffi::Module>(this)](
                                       ffi::PackedArgs arguments, ffi::Any*) { program->Call(arguments); });
}

void VulkanModule::Prepare(int index, int threads) {
  Device* device = Device::Get(index);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++users_[index];
  }
  std::vector<Program*> programs;
  for (auto& [name, program] : programs_) programs.push_back(program.get());
  std::atomic<size_t> next{0};
  std::optional<ffi::Error> error;  // no exception_ptr: wheels run with versions of libstdc++ that lack its functions
  std::mutex error_mutex;
  auto keep = [&](const ffi::Error& found) {
    std::lock_guard<std::mutex> lock(error_mutex);
    if (!error.has_value()) error = found;
    next = programs.size();
  };
  auto work = [&] {
    for (size_t i = next++; i < programs.size(); i = next++) {
      try {
        programs[i]->For(index, device);
      } catch (const ffi::Error& found) {
        keep(found);
      } catch (const std::exception& found) {
        keep(ffi::Error("RuntimeError", std::string("vulkan: ") + found.what(), ""));
      }
    }
  };
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(std::max(threads, 1)));
  try {
    for (int i = 1; i < threads; ++i) workers.emplace_back(work);
  } catch (const std::system_error&) {
    // As many as the system gives; this one does what they leave.
  }
  work();
  for (std::thread& worker : workers) worker.join();
  if (!error.has_value()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --users_[index];
  }
  throw *error;
}

void VulkanModule::Release(int index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index < 0 || static_cast<size_t>(index) >= users_.size() || users_[index] == 0) return;
  if (--users_[index] != 0) return;
  for (auto& [name, program] : programs_) program->Release(index);
  for (const std::shared_ptr<Device>& device : Device::AllOpen()) device->Trim();
}

}  // namespace mlcpipe::vulkan
