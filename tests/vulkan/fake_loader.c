// A Vulkan loader between the plugin and the system's: it fails calls on request, and makes devices look like others.
//
// FAKE_REAL     path of the system's libvulkan.so.1
// FAKE_TYPES    "2,4": a device of each of these VkPhysicalDeviceType, all of them the first real one
// FAKE_HIDE     ",VK_A,VK_B,": device extensions that are not there
// FAKE_RANGE    maxStorageBufferRange and maxMemoryAllocationSize
// FAKE_CLOCK    "0": no timestamps
// FAKE_VERSION  apiVersion
// FAKE_IDLE     kernels do nothing, so that what is left is the host's time
//
// It also measures how long a device has nothing to do between a wait of the host's and the next submission.
#define VK_NO_PROTOTYPES
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <vulkan/vulkan.h>

#define EXPORT __attribute__((visibility("default")))

struct fake_device { VkPhysicalDevice real; int type; };

static struct fake_device devices[8];
static int device_count;
static VkInstance instance;
static VkDevice device;
static PFN_vkGetInstanceProcAddr real_instance_proc;
static PFN_vkGetDeviceProcAddr real_device_proc;

// Bytes of device memory that are taken, and how many there are.
static struct { VkDeviceMemory handle; VkDeviceSize bytes; } taken[256];
static VkDeviceSize limit = ~(VkDeviceSize)0;

// The call `countdown` from now fails with `result`; -1: none. With `only`, calls of that name are counted down.
static long countdown = -1, calls;
static char only[64];
static int result_to_give, fired;
static int lost;
static char fired_name[64];

EXPORT void fake_arm(long at, int result) { countdown = at; result_to_give = result; fired = 0; fired_name[0] = 0; }
EXPORT void fake_only(const char* name) { snprintf(only, sizeof only, "%s", name); }
EXPORT void fake_limit(unsigned long long bytes) { limit = bytes; }
EXPORT int fake_fired(void) { return fired; }
EXPORT const char* fake_fired_name(void) { return fired_name; }
EXPORT long fake_calls(void) { return calls; }

// Nanoseconds of the clock when the last wait ended, and since then until the first submission after it.
static long long waited, gap;

EXPORT long long fake_gap(void) { return gap; }

static long long nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static VkResult inject(const char* name) {
  ++calls;
  if (lost) return VK_ERROR_DEVICE_LOST;
  if (only[0] && strcmp(only, name)) return VK_SUCCESS;
  if (countdown < 0 || countdown-- > 0) return VK_SUCCESS;
  fired = 1;
  snprintf(fired_name, sizeof fired_name, "%s", name);
  if (result_to_give == VK_ERROR_DEVICE_LOST) {
    lost = 1;
    // What a driver does too: nothing runs on the device any more.
    if (device) ((PFN_vkDeviceWaitIdle)real_device_proc(device, "vkDeviceWaitIdle"))(device);
  }
  return result_to_give;
}

#define REAL(name) ((PFN_##name)(device ? real_device_proc(device, #name) : NULL))
#define WRAP(name, params, args)                              \
  static VKAPI_ATTR VkResult VKAPI_CALL fake_##name params {  \
    VkResult injected = inject(#name);                        \
    return injected != VK_SUCCESS ? injected : REAL(name) args; \
  }

WRAP(vkCreateBuffer, (VkDevice d, const VkBufferCreateInfo* i, const VkAllocationCallbacks* a, VkBuffer* b), (d, i, a, b))
WRAP(vkBindBufferMemory, (VkDevice d, VkBuffer b, VkDeviceMemory m, VkDeviceSize o), (d, b, m, o))
WRAP(vkMapMemory, (VkDevice d, VkDeviceMemory m, VkDeviceSize o, VkDeviceSize s, VkMemoryMapFlags f, void** p), (d, m, o, s, f, p))
WRAP(vkCreateCommandPool, (VkDevice d, const VkCommandPoolCreateInfo* i, const VkAllocationCallbacks* a, VkCommandPool* p), (d, i, a, p))
WRAP(vkResetCommandPool, (VkDevice d, VkCommandPool p, VkCommandPoolResetFlags f), (d, p, f))
WRAP(vkAllocateCommandBuffers, (VkDevice d, const VkCommandBufferAllocateInfo* i, VkCommandBuffer* b), (d, i, b))
WRAP(vkBeginCommandBuffer, (VkCommandBuffer b, const VkCommandBufferBeginInfo* i), (b, i))
WRAP(vkEndCommandBuffer, (VkCommandBuffer b), (b))
WRAP(vkCreateSemaphore, (VkDevice d, const VkSemaphoreCreateInfo* i, const VkAllocationCallbacks* a, VkSemaphore* s), (d, i, a, s))
WRAP(vkGetSemaphoreCounterValue, (VkDevice d, VkSemaphore s, uint64_t* v), (d, s, v))
WRAP(vkCreateShaderModule, (VkDevice d, const VkShaderModuleCreateInfo* i, const VkAllocationCallbacks* a, VkShaderModule* m), (d, i, a, m))
WRAP(vkCreateDescriptorSetLayout, (VkDevice d, const VkDescriptorSetLayoutCreateInfo* i, const VkAllocationCallbacks* a, VkDescriptorSetLayout* l), (d, i, a, l))
WRAP(vkCreatePipelineLayout, (VkDevice d, const VkPipelineLayoutCreateInfo* i, const VkAllocationCallbacks* a, VkPipelineLayout* l), (d, i, a, l))
WRAP(vkCreateDescriptorPool, (VkDevice d, const VkDescriptorPoolCreateInfo* i, const VkAllocationCallbacks* a, VkDescriptorPool* p), (d, i, a, p))
WRAP(vkAllocateDescriptorSets, (VkDevice d, const VkDescriptorSetAllocateInfo* i, VkDescriptorSet* s), (d, i, s))
WRAP(vkCreatePipelineCache, (VkDevice d, const VkPipelineCacheCreateInfo* i, const VkAllocationCallbacks* a, VkPipelineCache* c), (d, i, a, c))
WRAP(vkGetPipelineCacheData, (VkDevice d, VkPipelineCache c, size_t* n, void* p), (d, c, n, p))
WRAP(vkCreateComputePipelines, (VkDevice d, VkPipelineCache c, uint32_t n, const VkComputePipelineCreateInfo* i, const VkAllocationCallbacks* a, VkPipeline* p), (d, c, n, i, a, p))
WRAP(vkCreateQueryPool, (VkDevice d, const VkQueryPoolCreateInfo* i, const VkAllocationCallbacks* a, VkQueryPool* p), (d, i, a, p))
WRAP(vkGetQueryPoolResults, (VkDevice d, VkQueryPool p, uint32_t f, uint32_t n, size_t s, void* t, VkDeviceSize e, VkQueryResultFlags g), (d, p, f, n, s, t, e, g))

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkQueueSubmit(VkQueue q, uint32_t n, const VkSubmitInfo* s, VkFence f) {
  VkResult result = inject("vkQueueSubmit");
  if (result == VK_SUCCESS) result = REAL(vkQueueSubmit)(q, n, s, f);
  if (waited) gap = nanoseconds() - waited;
  waited = 0;
  return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkWaitSemaphores(VkDevice d, const VkSemaphoreWaitInfo* i, uint64_t t) {
  VkResult result = inject("vkWaitSemaphores");
  if (result == VK_SUCCESS) result = REAL(vkWaitSemaphores)(d, i, t);
  waited = nanoseconds();
  return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkAllocateMemory(VkDevice d, const VkMemoryAllocateInfo* i, const VkAllocationCallbacks* a, VkDeviceMemory* m) {
  VkResult result = inject("vkAllocateMemory");
  VkDeviceSize sum = i->allocationSize;
  for (int k = 0; k < 256; ++k) sum += taken[k].handle ? taken[k].bytes : 0;
  if (result == VK_SUCCESS && sum > limit) result = VK_ERROR_OUT_OF_DEVICE_MEMORY;
  if (result == VK_SUCCESS) result = REAL(vkAllocateMemory)(d, i, a, m);
  for (int k = 0; result == VK_SUCCESS && k < 256; ++k) {
    if (taken[k].handle) continue;
    taken[k].handle = *m;
    taken[k].bytes = i->allocationSize;
    break;
  }
  return result;
}

static VKAPI_ATTR void VKAPI_CALL fake_vkFreeMemory(VkDevice d, VkDeviceMemory m, const VkAllocationCallbacks* a) {
  for (int k = 0; k < 256; ++k) {
    if (taken[k].handle == m) taken[k].handle = VK_NULL_HANDLE;
  }
  ((PFN_vkFreeMemory)real_device_proc(d, "vkFreeMemory"))(d, m, a);
}

static PFN_vkVoidFunction real_proc(const char* name) { return real_instance_proc(instance, name); }
static VkPhysicalDevice unwrap(VkPhysicalDevice d) { return ((struct fake_device*)d)->real; }

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkEnumeratePhysicalDevices(VkInstance i, uint32_t* n, VkPhysicalDevice* out) {
  VkPhysicalDevice real[8];
  uint32_t count = 8;
  VkResult result = ((PFN_vkEnumeratePhysicalDevices)real_proc("vkEnumeratePhysicalDevices"))(i, &count, real);
  if (result < 0 || count == 0) return result;
  const char* types = getenv("FAKE_TYPES");
  device_count = 0;
  for (const char* at = types; at && *at && device_count < 8; at = strchr(at, ',') ? strchr(at, ',') + 1 : "") {
    devices[device_count++] = (struct fake_device){real[0], atoi(at)};
  }
  if (!types) devices[device_count++] = (struct fake_device){real[0], -1};
  for (uint32_t k = 0; out && k < *n; ++k) out[k] = (VkPhysicalDevice)&devices[k];
  *n = (uint32_t)device_count;
  return VK_SUCCESS;
}

static VKAPI_ATTR void VKAPI_CALL fake_vkGetPhysicalDeviceProperties2(VkPhysicalDevice d, VkPhysicalDeviceProperties2* p) {
  ((PFN_vkGetPhysicalDeviceProperties2)real_proc("vkGetPhysicalDeviceProperties2"))(unwrap(d), p);
  const int type = ((struct fake_device*)d)->type;
  if (type >= 0) p->properties.deviceType = (VkPhysicalDeviceType)type;
  if (getenv("FAKE_VERSION")) p->properties.apiVersion = (uint32_t)strtoul(getenv("FAKE_VERSION"), NULL, 0);
  if (!getenv("FAKE_RANGE")) return;
  p->properties.limits.maxStorageBufferRange = (uint32_t)strtoul(getenv("FAKE_RANGE"), NULL, 0);
  for (VkBaseOutStructure* next = p->pNext; next; next = next->pNext) {
    if (next->sType != VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES) continue;
    ((VkPhysicalDeviceVulkan11Properties*)next)->maxMemoryAllocationSize = 2 * p->properties.limits.maxStorageBufferRange;
  }
}

static VKAPI_ATTR void VKAPI_CALL fake_vkGetPhysicalDeviceFeatures2(VkPhysicalDevice d, VkPhysicalDeviceFeatures2* f) {
  ((PFN_vkGetPhysicalDeviceFeatures2)real_proc("vkGetPhysicalDeviceFeatures2"))(unwrap(d), f);
}

static VKAPI_ATTR void VKAPI_CALL fake_vkGetPhysicalDeviceMemoryProperties2(VkPhysicalDevice d, VkPhysicalDeviceMemoryProperties2* m) {
  ((PFN_vkGetPhysicalDeviceMemoryProperties2)real_proc("vkGetPhysicalDeviceMemoryProperties2"))(unwrap(d), m);
}

static VKAPI_ATTR void VKAPI_CALL fake_vkGetPhysicalDeviceQueueFamilyProperties(VkPhysicalDevice d, uint32_t* n, VkQueueFamilyProperties* q) {
  ((PFN_vkGetPhysicalDeviceQueueFamilyProperties)real_proc("vkGetPhysicalDeviceQueueFamilyProperties"))(unwrap(d), n, q);
  const char* clock = getenv("FAKE_CLOCK");
  for (uint32_t i = 0; q && clock && i < *n; ++i) q[i].timestampValidBits = (uint32_t)atoi(clock);
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkEnumerateDeviceExtensionProperties(VkPhysicalDevice d, const char* layer, uint32_t* n, VkExtensionProperties* e) {
  VkResult result = ((PFN_vkEnumerateDeviceExtensionProperties)real_proc("vkEnumerateDeviceExtensionProperties"))(unwrap(d), layer, n, e);
  const char* hidden = getenv("FAKE_HIDE");
  for (uint32_t i = 0; e && hidden && i < *n; ++i) {
    char quoted[VK_MAX_EXTENSION_NAME_SIZE + 3];
    snprintf(quoted, sizeof quoted, ",%s,", e[i].extensionName);
    if (strstr(hidden, quoted)) snprintf(e[i].extensionName, sizeof e[i].extensionName, "VK_HIDDEN");
  }
  return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR(VkPhysicalDevice d, uint32_t* n, void* m) {
  typedef VkResult (VKAPI_PTR *Get)(VkPhysicalDevice, uint32_t*, void*);  // headers before 1.3.255 have no name for it
  return ((Get)real_proc("vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"))(unwrap(d), n, m);
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkCreateDevice(VkPhysicalDevice d, const VkDeviceCreateInfo* i, const VkAllocationCallbacks* a, VkDevice* out) {
  lost = 0;
  VkResult injected = inject("vkCreateDevice");
  if (injected != VK_SUCCESS) return injected;
  VkResult result = ((PFN_vkCreateDevice)real_proc("vkCreateDevice"))(unwrap(d), i, a, out);
  if (result == VK_SUCCESS) device = *out;
  return result;
}

#define ENTRY(name) {#name, (PFN_vkVoidFunction)fake_##name}
static const struct { const char* name; PFN_vkVoidFunction function; } wrapped[] = {
    ENTRY(vkCreateBuffer), ENTRY(vkBindBufferMemory), ENTRY(vkAllocateMemory), ENTRY(vkFreeMemory), ENTRY(vkMapMemory),
    ENTRY(vkCreateCommandPool), ENTRY(vkResetCommandPool), ENTRY(vkAllocateCommandBuffers),
    ENTRY(vkBeginCommandBuffer), ENTRY(vkEndCommandBuffer), ENTRY(vkQueueSubmit), ENTRY(vkCreateSemaphore),
    ENTRY(vkWaitSemaphores), ENTRY(vkGetSemaphoreCounterValue), ENTRY(vkCreateShaderModule),
    ENTRY(vkCreateDescriptorSetLayout), ENTRY(vkCreatePipelineLayout), ENTRY(vkCreateDescriptorPool),
    ENTRY(vkAllocateDescriptorSets), ENTRY(vkCreatePipelineCache), ENTRY(vkGetPipelineCacheData),
    ENTRY(vkCreateComputePipelines), ENTRY(vkCreateQueryPool), ENTRY(vkGetQueryPoolResults),
    ENTRY(vkEnumeratePhysicalDevices), ENTRY(vkGetPhysicalDeviceProperties2), ENTRY(vkGetPhysicalDeviceFeatures2),
    ENTRY(vkGetPhysicalDeviceMemoryProperties2), ENTRY(vkGetPhysicalDeviceQueueFamilyProperties),
    ENTRY(vkEnumerateDeviceExtensionProperties),
    ENTRY(vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR), ENTRY(vkCreateDevice),
};

EXPORT const char* fake_name(int i) { return i < (int)(sizeof wrapped / sizeof *wrapped) ? wrapped[i].name : NULL; }

static VKAPI_ATTR void VKAPI_CALL fake_vkCmdDispatch(VkCommandBuffer b, uint32_t x, uint32_t y, uint32_t z) { (void)b, (void)x, (void)y, (void)z; }

static PFN_vkVoidFunction find(const char* name) {
  if (!strcmp(name, "vkCmdDispatch")) return getenv("FAKE_IDLE") ? (PFN_vkVoidFunction)fake_vkCmdDispatch : NULL;
  for (size_t i = 0; i < sizeof wrapped / sizeof *wrapped; ++i) {
    if (!strcmp(name, wrapped[i].name)) return wrapped[i].function;
  }
  return NULL;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL fake_vkGetDeviceProcAddr(VkDevice d, const char* name) {
  PFN_vkVoidFunction own = find(name);
  return own ? own : real_device_proc(d, name);
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkCreateInstance(const VkInstanceCreateInfo* i, const VkAllocationCallbacks* a, VkInstance* out) {
  VkResult result = ((PFN_vkCreateInstance)real_instance_proc(NULL, "vkCreateInstance"))(i, a, out);
  instance = *out;
  if (result == VK_SUCCESS) real_device_proc = (PFN_vkGetDeviceProcAddr)real_proc("vkGetDeviceProcAddr");
  return result;
}

EXPORT VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance i, const char* name) {
  if (!real_instance_proc) {
    void* library = dlopen(getenv("FAKE_REAL"), RTLD_NOW | RTLD_LOCAL);
    if (library) real_instance_proc = (PFN_vkGetInstanceProcAddr)dlsym(library, "vkGetInstanceProcAddr");
    if (!real_instance_proc) return NULL;
  }
  if (!strcmp(name, "vkCreateInstance")) return (PFN_vkVoidFunction)fake_vkCreateInstance;
  if (!strcmp(name, "vkGetDeviceProcAddr")) return (PFN_vkVoidFunction)fake_vkGetDeviceProcAddr;
  PFN_vkVoidFunction own = find(name);
  return own ? own : real_instance_proc(i, name);
}
