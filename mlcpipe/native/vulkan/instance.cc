#include "instance.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "error.h"

namespace mlcpipe::vulkan {
namespace {

struct Shared {
  std::mutex mutex;
  Options options;
  Instance* instance = nullptr;
};

// Never destroyed: at exit, tensors may be freed after static objects.
Shared& GetShared() {
  static Shared* shared = new Shared();
  return *shared;
}

}  // namespace

Instance& Instance::Get() {
  Shared& shared = GetShared();
  std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.instance == nullptr) shared.instance = new Instance(shared.options);
  return *shared.instance;
}

void Instance::Configure(const Options& options) {
  Shared& shared = GetShared();
  std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.instance != nullptr) Fail("configure was called after the first use of Vulkan in this process");
  shared.options = options;
}

Instance::Instance(Options options) : options_(std::move(options)) {
  problem_ = Open();
  if (problem_.empty()) problem_ = Create();
  if (problem_.empty()) problem_ = Enumerate();
}

std::string Instance::Open() {
  void* library = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) library = dlopen("libvulkan.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "the system has no Vulkan loader (libvulkan.so.1)";
  functions_.GetInstanceProcAddr =
      reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
  if (functions_.GetInstanceProcAddr == nullptr) return "libvulkan.so.1 is not a Vulkan loader";
  return "";
}

std::string Instance::Create() {
  auto create = reinterpret_cast<PFN_vkCreateInstance>(functions_.GetInstanceProcAddr(nullptr, "vkCreateInstance"));
  if (create == nullptr) return "libvulkan.so.1 is not a Vulkan loader";
  VkApplicationInfo application{VK_STRUCTURE_TYPE_APPLICATION_INFO};
  application.pApplicationName = "mlcpipe";
  application.apiVersion = VK_API_VERSION_1_3;  // devices with 1.2 work too; loaders since 1.1 accept any version
  VkInstanceCreateInfo info{VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO};
  info.pApplicationInfo = &application;
  const char* const extensions[] = {VK_EXT_DEBUG_UTILS_EXTENSION_NAME};
  const VkValidationFeatureEnableEXT enabled[] = {VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT};
  VkValidationFeaturesEXT features{VK_STRUCTURE_TYPE_VALIDATION_FEATURES_EXT};
  if (options_.validation) {
    features.enabledValidationFeatureCount = 1;
    features.pEnabledValidationFeatures = enabled;
    features.pNext = validation_.CreateInfo();
    info.pNext = &features;
    info.enabledExtensionCount = 1;
    info.ppEnabledExtensionNames = extensions;
  }
  VkResult result = create(&info, nullptr, &handle_);
  if (result == VK_ERROR_INCOMPATIBLE_DRIVER) return "the system has a Vulkan loader and no driver for it";
  if (result != VK_SUCCESS) return "Vulkan does not start (vkCreateInstance: " + ResultName(result) + ")";
#define MLCPIPE_VK_LOAD(name)                                                                             \
  functions_.name = reinterpret_cast<PFN_vk##name>(functions_.GetInstanceProcAddr(handle_, "vk" #name));  \
  if (functions_.name == nullptr) return "the Vulkan loader is older than 1.1: it has no vk" #name;
  MLCPIPE_VK_INSTANCE(MLCPIPE_VK_LOAD)
#undef MLCPIPE_VK_LOAD
  functions_.GetMatrices = reinterpret_cast<PFN_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR>(
      functions_.GetInstanceProcAddr(handle_, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"));
  if (options_.validation) {
    // Messages other than those of creating and destroying the instance need a messenger. It is never destroyed.
    auto watch = reinterpret_cast<PFN_vkCreateDebugUtilsMessengerEXT>(
        functions_.GetInstanceProcAddr(handle_, "vkCreateDebugUtilsMessengerEXT"));
    VkDebugUtilsMessengerEXT messenger = VK_NULL_HANDLE;
    if (watch == nullptr || watch(handle_, validation_.CreateInfo(), nullptr, &messenger) != VK_SUCCESS) {
      return "the validation layer takes no messenger";
    }
  }
  return "";
}

std::string Instance::Enumerate() {
  uint32_t count = 0;
  VkResult result = functions_.EnumeratePhysicalDevices(handle_, &count, nullptr);
  std::vector<VkPhysicalDevice> handles(count);
  if (result == VK_SUCCESS) result = functions_.EnumeratePhysicalDevices(handle_, &count, handles.data());
  if (result != VK_SUCCESS && result != VK_INCOMPLETE) {
    return "the Vulkan drivers do not list their devices (" + ResultName(result) + ")";
  }
  handles.resize(count);
  for (VkPhysicalDevice handle : handles) adapters_.push_back(std::make_unique<Adapter>(functions_, handle));
  auto rank = [](const std::unique_ptr<Adapter>& adapter) {
    return std::make_pair(!adapter->problem().empty(), adapter->rank());
  };
  std::stable_sort(adapters_.begin(), adapters_.end(),
                   [&](const auto& left, const auto& right) { return rank(left) < rank(right); });
  for (const auto& adapter : adapters_) usable_count_ += adapter->problem().empty();
  return adapters_.empty() ? "the system's Vulkan drivers have no device" : "";
}

}  // namespace mlcpipe::vulkan
