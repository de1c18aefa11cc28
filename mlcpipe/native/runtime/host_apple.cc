// The machine where it is Apple's: iPhones, and their simulator. Never run on one.
#include <TargetConditionals.h>
#include <mach/mach.h>
#include <sys/sysctl.h>
#include <unistd.h>

#include <algorithm>

#include "host.h"

#if TARGET_OS_IPHONE
extern "C" size_t os_proc_available_memory(void);  // os/proc.h
#endif

namespace mlcpipe {
namespace {

// An integer of the system's, 0 where it has none of that name.
int64_t Sysctl(const char* name) {
  int64_t value = 0;
  size_t bytes = sizeof value;
  return sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 ? value : 0;
}

}  // namespace

const std::set<std::string>& HostFeatures() {
  static const std::set<std::string> features = [] {
    // Apple, "Determining instruction set characteristics"
    constexpr const char* kNames[][2] = {
        {"asimddp", "hw.optional.arm.FEAT_DotProd"}, {"asimdhp", "hw.optional.arm.FEAT_FP16"},
        {"i8mm", "hw.optional.arm.FEAT_I8MM"},       {"bf16", "hw.optional.arm.FEAT_BF16"},
        {"asimdrdm", "hw.optional.arm.FEAT_RDM"},    {"atomics", "hw.optional.arm.FEAT_LSE"}};
    std::set<std::string> names;
    for (const auto& name : kNames) {
      if (Sysctl(name[1]) == 1) names.insert(name[0]);
    }
    return names;
  }();
  return features;
}

// Level 0 are the performance cores.
int DefaultThreads() {
  const int64_t fast = Sysctl("hw.perflevel0.physicalcpu");
  return static_cast<int>(std::clamp<int64_t>(fast ? fast : Sysctl("hw.physicalcpu"), 1, 4));
}

FreeMemory FindFreeMemory() {
#if TARGET_OS_IPHONE
  if (const size_t left = os_proc_available_memory()) {
    return {static_cast<int64_t>(left), "what the system lets an app have"};
  }
#endif
  vm_statistics64_data_t pages;
  mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
  const auto into = reinterpret_cast<host_info64_t>(&pages);
  if (host_statistics64(mach_host_self(), HOST_VM_INFO64, into, &count) != KERN_SUCCESS) return {INT64_MAX, ""};
  const auto free = static_cast<int64_t>(pages.free_count) + pages.inactive_count + pages.purgeable_count;
  return {free * sysconf(_SC_PAGESIZE), ""};
}

}  // namespace mlcpipe
