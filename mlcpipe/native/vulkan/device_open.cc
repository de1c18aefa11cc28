// Opening and closing of devices.
#include <algorithm>

#include "device.h"
#include "error.h"
#include "instance.h"

namespace mlcpipe::vulkan {
namespace {

struct Slots {
  std::mutex mutex;
  std::vector<std::shared_ptr<Device>> open;
  // Lost devices stay: callers may still hold them or their tensors.
  std::vector<std::shared_ptr<Device>> lost;
  std::vector<std::atomic<Device*>> fast;

  explicit Slots(size_t count) : open(count), fast(count) {}
};

Slots& GetSlots() {
  static Slots* slots = new Slots(Instance::Get().usable_count());
  return *slots;
}

[[noreturn]] void FailNoDevice(int index) {
  const Instance& instance = Instance::Get();
  if (!instance.problem().empty()) Fail(instance.problem());
  std::string message = "there is no device vulkan:" + std::to_string(index) + "; ";
  if (instance.usable_count() == 0) message += "none can be used";
  for (size_t i = 0; i < instance.adapters().size(); ++i) {
    const Adapter& adapter = *instance.adapters()[i];
    message += (i != 0 ? ", " : "") + (i < instance.usable_count() ? "vulkan:" + std::to_string(i) + " is " : "") +
             adapter.title() + (adapter.problem().empty() ? "" : ": " + adapter.problem());
  }
  Fail(message);
}

}  // namespace

Device* Device::Get(int index) {
  Slots& slots = GetSlots();
  if (index < 0 || static_cast<size_t>(index) >= slots.open.size()) FailNoDevice(index);
  Device* device = slots.fast[index].load(std::memory_order_acquire);
  if (device != nullptr && !device->lost()) return device;
  std::lock_guard<std::mutex> lock(slots.mutex);
  std::shared_ptr<Device>& slot = slots.open[index];
  if (slot != nullptr && slot->lost()) {
    std::erase_if(slots.lost, [](const std::shared_ptr<Device>& old) { return old.use_count() == 1; });
    slots.lost.push_back(std::move(slot));
  }
  if (slot == nullptr) {
    auto fresh = std::make_shared<Device>(*Instance::Get().adapters()[index]);
    fresh->Open();
    slot = std::move(fresh);
    slots.fast[index].store(slot.get(), std::memory_order_release);
  }
  return slot.get();
}

std::vector<std::shared_ptr<Device>> Device::AllOpen() {
  Slots& slots = GetSlots();
  std::lock_guard<std::mutex> lock(slots.mutex);
  std::vector<std::shared_ptr<Device>> devices;
  for (const std::shared_ptr<Device>& device : slots.open) {
    if (device != nullptr) devices.push_back(device);
  }
  return devices;
}

Device::Device(const Adapter& adapter) : adapter_(adapter) {}

void Device::Open() {
  const float priority = 1;
  VkDeviceQueueCreateInfo queue{VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO};
  queue.queueFamilyIndex = adapter_.queue_family();
  queue.queueCount = 1;
  queue.pQueuePriorities = &priority;
  const std::vector<const char*> extensions = adapter_.Extensions();
  FeatureChain features;
  VkDeviceCreateInfo info{VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO};
  info.pNext = adapter_.Enable(&features);
  info.queueCreateInfoCount = 1;
  info.pQueueCreateInfos = &queue;
  info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  info.ppEnabledExtensionNames = extensions.data();
  Check(adapter_.functions().CreateDevice(adapter_.handle(), &info, nullptr, &handle_), "vkCreateDevice");
  LoadFunctions();
  memory_.emplace(adapter_, functions_, handle_);
  pipelines_.emplace(adapter_, functions_, handle_, Instance::Get().options().cache_folder);
  VkQueue handle = VK_NULL_HANDLE;
  functions_.GetDeviceQueue(handle_, adapter_.queue_family(), 0, &handle);
  commands_.emplace(*this, handle, adapter_.queue_family());
  commands_->Create();
  if (adapter_.has_timestamps()) CreateTimestamps();
  RaiseValidation();
}

void Device::LoadFunctions() {
  const PFN_vkGetDeviceProcAddr find = adapter_.functions().GetDeviceProcAddr;
#define MLCPIPE_VK_LOAD(name)                                                            \
  functions_.name = reinterpret_cast<PFN_vk##name>(find(handle_, "vk" #name));           \
  if (functions_.name == nullptr) Fail(adapter_.title() + " has no vk" #name);
  MLCPIPE_VK_DEVICE(MLCPIPE_VK_LOAD)
#undef MLCPIPE_VK_LOAD
  if (adapter_.max_push_descriptors() != 0) {
    functions_.CmdPushDescriptorSetKHR =
        reinterpret_cast<PFN_vkCmdPushDescriptorSetKHR>(find(handle_, "vkCmdPushDescriptorSetKHR"));
  }
}

std::string Device::SavePipelines() { return lost() ? "" : pipelines_->cache().Save(); }

Device::~Device() {
  if (handle_ == VK_NULL_HANDLE) return;
  if (functions_.DeviceWaitIdle != nullptr && !lost()) functions_.DeviceWaitIdle(handle_);
  if (commands_ && downloads_ != nullptr) DeleteBuffer(downloads_);
  if (commands_) uploads_.Destroy();
  if (commands_) workspaces_.Drop();
  for (const Grave& grave : graves_) Erase(grave);
  profile_.reset();
  commands_.reset();
  pipelines_.reset();
  if (timestamps_ != VK_NULL_HANDLE) functions_.DestroyQueryPool(handle_, timestamps_, nullptr);
  memory_.reset();
  if (functions_.DestroyDevice != nullptr) functions_.DestroyDevice(handle_, nullptr);
}

}  // namespace mlcpipe::vulkan
