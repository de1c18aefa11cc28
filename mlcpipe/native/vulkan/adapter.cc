#include "adapter.h"

#include <algorithm>
#include <utility>

namespace mlcpipe::vulkan {
namespace {

// Names of features (the specification's), and the driver's field for each.
#define MLCPIPE_VK_FEATURES(X)                                                              \
  X("shaderFloat64", core.features.shaderFloat64)                                           \
  X("shaderInt64", core.features.shaderInt64)                                               \
  X("shaderInt16", core.features.shaderInt16)                                               \
  X("storageBuffer16BitAccess", v11.storageBuffer16BitAccess)                               \
  X("storagePushConstant16", v11.storagePushConstant16)                                     \
  X("shaderFloat16", v12.shaderFloat16)                                                     \
  X("shaderInt8", v12.shaderInt8)                                                           \
  X("storageBuffer8BitAccess", v12.storageBuffer8BitAccess)                                 \
  X("storagePushConstant8", v12.storagePushConstant8)                                       \
  X("shaderSubgroupExtendedTypes", v12.shaderSubgroupExtendedTypes)                         \
  X("vulkanMemoryModel", v12.vulkanMemoryModel)                                             \
  X("vulkanMemoryModelDeviceScope", v12.vulkanMemoryModelDeviceScope)                       \
  X("subgroupSizeControl", size_control.subgroupSizeControl)                                \
  X("computeFullSubgroups", size_control.computeFullSubgroups)                              \
  X("shaderIntegerDotProduct", dot.shaderIntegerDotProduct)                                 \
  X("cooperativeMatrix", matrix.cooperativeMatrix)

const std::pair<const char*, VkSubgroupFeatureFlagBits> kSubgroupFeatures[] = {
    {"subgroupBasic", VK_SUBGROUP_FEATURE_BASIC_BIT},
    {"subgroupVote", VK_SUBGROUP_FEATURE_VOTE_BIT},
    {"subgroupArithmetic", VK_SUBGROUP_FEATURE_ARITHMETIC_BIT},
    {"subgroupBallot", VK_SUBGROUP_FEATURE_BALLOT_BIT},
    {"subgroupShuffle", VK_SUBGROUP_FEATURE_SHUFFLE_BIT},
    {"subgroupShuffleRelative", VK_SUBGROUP_FEATURE_SHUFFLE_RELATIVE_BIT},
    {"subgroupClustered", VK_SUBGROUP_FEATURE_CLUSTERED_BIT},
    {"subgroupQuad", VK_SUBGROUP_FEATURE_QUAD_BIT},
};

// Properties that kernels' execution modes require.
const std::pair<const char*, VkBool32 VkPhysicalDeviceVulkan12Properties::*> kFloatControls[] = {
    {"shaderSignedZeroInfNanPreserveFloat16",
     &VkPhysicalDeviceVulkan12Properties::shaderSignedZeroInfNanPreserveFloat16},
    {"shaderSignedZeroInfNanPreserveFloat32",
     &VkPhysicalDeviceVulkan12Properties::shaderSignedZeroInfNanPreserveFloat32},
    {"shaderDenormPreserveFloat16", &VkPhysicalDeviceVulkan12Properties::shaderDenormPreserveFloat16},
    {"shaderDenormPreserveFloat32", &VkPhysicalDeviceVulkan12Properties::shaderDenormPreserveFloat32},
    {"shaderRoundingModeRTEFloat16", &VkPhysicalDeviceVulkan12Properties::shaderRoundingModeRTEFloat16},
    {"shaderRoundingModeRTEFloat32", &VkPhysicalDeviceVulkan12Properties::shaderRoundingModeRTEFloat32},
};

constexpr uint32_t kMatrixSizes[] = {8, 16, 32};

std::string MatrixFeature(uint32_t rows, uint32_t columns, uint32_t depth) {
  return "cooperativeMatrix" + std::to_string(rows) + "x" + std::to_string(columns) + "x" + std::to_string(depth);
}

}  // namespace

VkPhysicalDeviceFeatures2* FeatureChain::Link(bool has_size_control, bool has_dot, bool has_matrix) {
  core.pNext = &v11;
  v11.pNext = &v12;
  void** end = &v12.pNext;
  auto append = [&](auto* structure) {
    *end = structure;
    end = &structure->pNext;
  };
  if (has_size_control) append(&size_control);
  if (has_dot) append(&dot);
  if (has_matrix) append(&matrix);
  *end = nullptr;
  return &core;
}

Adapter::Adapter(const InstanceFunctions& functions, VkPhysicalDevice handle)
    : functions_(functions), handle_(handle) {
  functions_.GetPhysicalDeviceProperties2(handle_, &properties_);
  if (properties().apiVersion >= VK_API_VERSION_1_2) {
    v1_3_ = properties().apiVersion >= VK_API_VERSION_1_3;
    ReadExtensions();
    ReadProperties();
    ReadFeatures();
    ReadQueues();
  }
  problem_ = FindProblem();
}

void Adapter::ReadExtensions() {
  uint32_t count = 0;
  functions_.EnumerateDeviceExtensionProperties(handle_, nullptr, &count, nullptr);
  std::vector<VkExtensionProperties> extensions(count);
  functions_.EnumerateDeviceExtensionProperties(handle_, nullptr, &count, extensions.data());
  extensions.resize(std::min<size_t>(count, extensions.size()));
  for (const VkExtensionProperties& extension : extensions) extensions_.insert(extension.extensionName);
  has_size_control_ = v1_3_ || HasExtension(VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME);
  has_dot_ = v1_3_ || HasExtension(VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME);
  has_matrix_ = HasExtension(VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME);
}

void Adapter::ReadProperties() {
  VkPhysicalDeviceSubgroupSizeControlProperties sizes{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES};
  VkPhysicalDevicePushDescriptorPropertiesKHR push{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PUSH_DESCRIPTOR_PROPERTIES_KHR};
  v11_.pNext = &v12_;
  void** end = &v12_.pNext;
  if (has_size_control_) {
    *end = &sizes;
    end = &sizes.pNext;
  }
  if (HasExtension(VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME)) *end = &push;
  properties_.pNext = &v11_;
  functions_.GetPhysicalDeviceProperties2(handle_, &properties_);
  properties_.pNext = v11_.pNext = v12_.pNext = nullptr;
  max_push_descriptors_ = push.maxPushDescriptors;
  min_subgroup_size_ = has_size_control_ ? sizes.minSubgroupSize : v11_.subgroupSize;
  max_subgroup_size_ = has_size_control_ ? sizes.maxSubgroupSize : v11_.subgroupSize;
  can_require_subgroup_size_ = sizes.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT;

  VkPhysicalDeviceMemoryProperties2 memory{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2};
  functions_.GetPhysicalDeviceMemoryProperties2(handle_, &memory);
  memory_ = memory.memoryProperties;
}

void Adapter::ReadFeatures() {
  functions_.GetPhysicalDeviceFeatures2(handle_, supported_.Link(has_size_control_, has_dot_, has_matrix_));
#define MLCPIPE_VK_READ(name, field) \
  if (supported_.field) features_.insert(name);
  MLCPIPE_VK_FEATURES(MLCPIPE_VK_READ)
#undef MLCPIPE_VK_READ
  can_require_subgroup_size_ = can_require_subgroup_size_ && supported_.size_control.subgroupSizeControl;
  if (v11_.subgroupSupportedStages & VK_SHADER_STAGE_COMPUTE_BIT) {
    for (const auto& [name, bit] : kSubgroupFeatures) {
      if (v11_.subgroupSupportedOperations & bit) features_.insert(name);
    }
  }
  for (const auto& [name, field] : kFloatControls) {
    if (v12_.*field) features_.insert(name);
  }
  if (supported_.matrix.cooperativeMatrix && functions_.GetMatrices != nullptr) ReadMatrices();
}

// Adds a feature for each shape of float16 products with float32 accumulation that a subgroup can compute.
void Adapter::ReadMatrices() {
  uint32_t count = 0;
  functions_.GetMatrices(handle_, &count, nullptr);
  std::vector<VkCooperativeMatrixPropertiesKHR> shapes(count, {VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR});
  functions_.GetMatrices(handle_, &count, shapes.data());
  shapes.resize(std::min<size_t>(count, shapes.size()));
  for (const VkCooperativeMatrixPropertiesKHR& shape : shapes) {
    const bool factors = shape.AType == VK_COMPONENT_TYPE_FLOAT16_KHR && shape.BType == VK_COMPONENT_TYPE_FLOAT16_KHR;
    const bool sums = shape.CType == VK_COMPONENT_TYPE_FLOAT32_KHR && shape.ResultType == VK_COMPONENT_TYPE_FLOAT32_KHR;
    if (!factors || !sums || shape.scope != VK_SCOPE_SUBGROUP_KHR) continue;
    features_.insert(MatrixFeature(shape.MSize, shape.NSize, shape.KSize));
  }
}

const std::set<std::string>& Adapter::known_features() {
  static const std::set<std::string>* known = [] {
    auto* names = new std::set<std::string>();
#define MLCPIPE_VK_NAME(name, field) names->insert(name);
    MLCPIPE_VK_FEATURES(MLCPIPE_VK_NAME)
#undef MLCPIPE_VK_NAME
    for (const auto& entry : kSubgroupFeatures) names->insert(entry.first);
    for (const auto& entry : kFloatControls) names->insert(entry.first);
    for (const uint32_t rows : kMatrixSizes) {
      for (const uint32_t columns : kMatrixSizes) {
        for (const uint32_t depth : kMatrixSizes) names->insert(MatrixFeature(rows, columns, depth));
      }
    }
    return names;
  }();
  return *known;
}

VkPhysicalDeviceFeatures2* Adapter::Enable(FeatureChain* chain) const {
#define MLCPIPE_VK_COPY(name, field) chain->field = supported_.field;
  MLCPIPE_VK_FEATURES(MLCPIPE_VK_COPY)
#undef MLCPIPE_VK_COPY
  chain->v12.timelineSemaphore = VK_TRUE;
  return chain->Link(has_size_control_, has_dot_, has_matrix_);
}

std::vector<const char*> Adapter::Extensions() const {
  std::vector<const char*> names;
  for (const char* name :
       {VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME, VK_EXT_MEMORY_BUDGET_EXTENSION_NAME,
        VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME, VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME,
        VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME, "VK_KHR_portability_subset"}) {
    if (HasExtension(name)) names.push_back(name);
  }
  return names;
}

// Prefers a compute-only family, which does not wait for the desktop's graphics, and one with timestamps.
void Adapter::ReadQueues() {
  uint32_t count = 0;
  functions_.GetPhysicalDeviceQueueFamilyProperties(handle_, &count, nullptr);
  std::vector<VkQueueFamilyProperties> families(count);
  functions_.GetPhysicalDeviceQueueFamilyProperties(handle_, &count, families.data());
  int best = -1;
  for (uint32_t i = 0; i < count; ++i) {
    if (!(families[i].queueFlags & VK_QUEUE_COMPUTE_BIT) || families[i].queueCount == 0) continue;
    const bool timed = families[i].timestampValidBits != 0;
    const int score = 2 * timed + !(families[i].queueFlags & VK_QUEUE_GRAPHICS_BIT);
    if (score <= best) continue;
    best = score;
    queue_family_ = i;
    has_timestamps_ = timed && limits().timestampPeriod > 0;
  }
}

std::string Adapter::FindProblem() const {
  const uint32_t version = properties().apiVersion;
  if (version < VK_API_VERSION_1_2) {
    return "its driver has Vulkan " + std::to_string(VK_API_VERSION_MAJOR(version)) + "." +
           std::to_string(VK_API_VERSION_MINOR(version)) + ", 1.2 is needed";
  }
  if (queue_family_ == UINT32_MAX) return "it runs no compute kernels";
  if (!supported_.v12.timelineSemaphore) return "its driver has no timeline semaphores";
  return "";
}

std::string Adapter::title() const {
  std::string driver = v12_.driverName;
  if (v12_.driverInfo[0] != '\0') driver += std::string(driver.empty() ? "" : " ") + v12_.driverInfo;
  return std::string(properties().deviceName) + (driver.empty() ? "" : " [" + driver + "]");
}

const char* Adapter::type() const {
  switch (properties().deviceType) {
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
      return "discrete";
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
      return "integrated";
    case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:
      return "virtual";
    case VK_PHYSICAL_DEVICE_TYPE_CPU:
      return "software";
    default:
      return "other";
  }
}

int Adapter::rank() const {
  switch (properties().deviceType) {
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
      return 0;
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
      return 1;
    case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:
      return 2;
    case VK_PHYSICAL_DEVICE_TYPE_CPU:
      return 4;
    default:
      return 3;
  }
}

bool Adapter::unified() const {
  return properties().deviceType == VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU || software();
}

bool Adapter::software() const { return properties().deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU; }

VkDeviceSize Adapter::max_buffer_bytes() const {
  return std::min<VkDeviceSize>(limits().maxStorageBufferRange, v11_.maxMemoryAllocationSize) & ~VkDeviceSize{15};
}

VkDeviceSize Adapter::memory_bytes() const {
  VkDeviceSize most = 0;
  for (uint32_t i = 0; i < memory_.memoryHeapCount; ++i) {
    if (memory_.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) most = std::max(most, memory_.memoryHeaps[i].size);
  }
  return most;
}

VkDeviceSize Adapter::free_bytes() const {
  if (!HasExtension(VK_EXT_MEMORY_BUDGET_EXTENSION_NAME)) return memory_bytes();
  VkPhysicalDeviceMemoryBudgetPropertiesEXT budget{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT};
  VkPhysicalDeviceMemoryProperties2 memory{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2, &budget};
  functions_.GetPhysicalDeviceMemoryProperties2(handle_, &memory);
  VkDeviceSize largest = 0, left = 0;
  for (uint32_t i = 0; i < memory_.memoryHeapCount; ++i) {
    if (!(memory_.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT)) continue;
    if (memory_.memoryHeaps[i].size <= largest) continue;
    largest = memory_.memoryHeaps[i].size;
    left = budget.heapBudget[i] - std::min(budget.heapBudget[i], budget.heapUsage[i]);
  }
  return left;
}

}  // namespace mlcpipe::vulkan
