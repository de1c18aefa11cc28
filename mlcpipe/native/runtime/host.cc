#include "host.h"

#include <sched.h>
#include <sys/auxv.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <vector>

namespace mlcpipe {
namespace {

// Of a small file of the system, "" if it cannot be read.
std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A number that is all of a file; -1 without one.
int64_t ReadNumber(const std::string& path) {
  std::istringstream text(ReadText(path));
  int64_t number;
  return text >> number ? number : -1;
}

// The number behind a name at the start of a line; -1 without one.
int64_t NumberAfter(const std::string& text, const std::string& name) {
  const size_t at = text.rfind(name, 0) == 0 ? 0 : text.find("\n" + name);
  if (at == std::string::npos) return -1;
  std::istringstream rest(text.substr(at + name.size() + (at != 0)));
  int64_t number;
  return rest >> number ? number : -1;
}

#if defined(__x86_64__)
// Of all processors, in /proc/cpuinfo.
std::set<std::string> Reported() {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> common;
  bool first = true;
  std::string last_line;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 || line == last_line) continue;
    last_line = line;
    std::istringstream words(line.substr(line.find(':') + 1));
    const std::set<std::string> flags{std::istream_iterator<std::string>(words), {}};
    std::set<std::string> both;
    std::set_intersection(flags.begin(), flags.end(), common.begin(), common.end(), std::inserter(both, both.end()));
    common = first ? flags : both;
    first = false;
  }
  // arch_prctl(2): ARCH_REQ_XCOMP_PERM of XTILEDATA
  if (common.count("amx_tile") && syscall(SYS_arch_prctl, 0x1023, 18) != 0) {
    for (const char* name : {"amx_tile", "amx_int8", "amx_bf16"}) common.erase(name);
  }
  return common;
}
#else
// asm/hwcap.h of Linux; on RISC-V a bit for each letter.
std::set<std::string> Reported() {
  struct Bit {
    const char* name;
    unsigned long word;
    int bit;
  };
#if defined(__aarch64__)
  constexpr Bit kBits[] = {{"crc32", AT_HWCAP, 7},     {"atomics", AT_HWCAP, 8},  {"asimdhp", AT_HWCAP, 10},
                           {"asimdrdm", AT_HWCAP, 12}, {"asimddp", AT_HWCAP, 20}, {"sve", AT_HWCAP, 22},
                           {"sve2", AT_HWCAP2, 1},     {"i8mm", AT_HWCAP2, 13},   {"bf16", AT_HWCAP2, 14}};
#else
  constexpr Bit kBits[] = {{"v", AT_HWCAP, 21}};
#endif
  std::set<std::string> names;
  for (const Bit& one : kBits) {
    if (getauxval(one.word) >> one.bit & 1) names.insert(one.name);
  }
  return names;
}
#endif

constexpr const char* kCgroups = "/sys/fs/cgroup";

// The memory that a cgroup leaves: its limit minus its use; files that were not used for long are free.
void AddCgroup(const std::string& folder, FreeMemory* least) {
  int64_t limit = INT64_MAX;
  for (const char* name : {"memory.max", "memory.high", "memory.limit_in_bytes"}) {
    if (const int64_t found = ReadNumber(folder + "/" + name); found >= 0) limit = std::min(limit, found);
  }
  int64_t used = ReadNumber(folder + "/memory.current");
  if (used < 0) used = ReadNumber(folder + "/memory.usage_in_bytes");
  if (used < 0 || limit == INT64_MAX) return;
  const std::string stat = ReadText(folder + "/memory.stat");
  int64_t cached = NumberAfter(stat, "total_inactive_file");
  if (cached < 0) cached = std::max<int64_t>(0, NumberAfter(stat, "inactive_file"));
  const int64_t left = std::max<int64_t>(0, limit - std::max<int64_t>(0, used - cached));
  if (left < least->bytes) *least = {left, "the " + SizeWords(limit) + " of its cgroup"};
}

// The share of processor time that a cgroup grants, in processors.
void AddQuota(const std::string& folder, double* least) {
  std::istringstream words(ReadText(folder + "/cpu.max"));  // "max 100000" without a limit
  int64_t quota = 0, period = 0;
  if (!(words >> quota >> period)) {
    quota = ReadNumber(folder + "/cpu.cfs_quota_us");
    period = ReadNumber(folder + "/cpu.cfs_period_us");
  }
  if (quota > 0 && period > 0) *least = std::min(*least, static_cast<double>(quota) / static_cast<double>(period));
}

// The cgroups of this process with a controller, and their parents: cgroups(7). A container may see the path that its
// host has for it, of which an end lies below the mount point, or nothing.
void ForCgroups(const std::string& controller, const std::function<void(const std::string&)>& add) {
  std::istringstream lines(ReadText("/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const size_t one = line.find(':'), two = line.find(':', one + 1);
    if (two == std::string::npos) continue;
    const bool second = line.substr(0, one) == "0";
    const std::string controllers = "," + line.substr(one + 1, two - one - 1) + ",";
    if (!second && controllers.find("," + controller + ",") == std::string::npos) continue;
    for (const std::string& mount : {std::string(kCgroups), kCgroups + std::string("/unified"), kCgroups + ("/" + controller)}) {
      for (std::string end = line.substr(two + 1); !end.empty(); end = end.substr(std::min(end.find('/', 1), end.size()))) {
        for (std::string part = end; !part.empty(); part.resize(part.rfind('/'))) add(mount + part);
      }
      add(mount);
    }
  }
}

void AddLimit(decltype(RLIMIT_AS) resource, int64_t used_kib, const char* words, FreeMemory* least) {
  rlimit limit;
  if (used_kib < 0 || getrlimit(resource, &limit) != 0) return;
  if (limit.rlim_cur == RLIM_INFINITY) return;
  const int64_t left = std::max<int64_t>(0, static_cast<int64_t>(limit.rlim_cur) - used_kib * 1024);
  if (left < least->bytes) *least = {left, words};
}

}  // namespace

const std::set<std::string>& HostFeatures() {
  static const std::set<std::string> features = Reported();
  return features;
}

int DefaultThreads() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return 1;
  struct Core {
    int64_t package, id, capacity;
  };
  std::vector<Core> cores;
  int64_t best = 0, worst = INT64_MAX;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/";
    int64_t capacity = ReadNumber(folder + "cpu_capacity");
    if (capacity < 0) capacity = 1;  // all alike
    best = std::max(best, capacity);
    worst = std::min(worst, capacity);
    const int64_t id = ReadNumber(folder + "topology/core_id");
    cores.push_back({ReadNumber(folder + "topology/physical_package_id"), id < 0 ? cpu : id, capacity});
  }
  std::set<std::pair<int64_t, int64_t>> good;
  for (const Core& core : cores) {
    if (core.capacity * 10 >= best * 6) good.insert({core.package, core.id});
  }
  int count = static_cast<int>(good.size());
  if (best != worst) count = std::min(count, 4);
  double quota = count;
  ForCgroups("cpu", [&](const std::string& folder) { AddQuota(folder, &quota); });
  return std::max(1, static_cast<int>(quota));
}

FreeMemory FindFreeMemory() {
  FreeMemory least{INT64_MAX, ""};
  const int64_t available = NumberAfter(ReadText("/proc/meminfo"), "MemAvailable:");
  if (available >= 0) least.bytes = available * 1024;
  ForCgroups("memory", [&](const std::string& folder) { AddCgroup(folder, &least); });
  const std::string status = ReadText("/proc/self/status");
  AddLimit(RLIMIT_AS, NumberAfter(status, "VmSize:"), "RLIMIT_AS (ulimit -v)", &least);
  AddLimit(RLIMIT_DATA, NumberAfter(status, "VmData:"), "RLIMIT_DATA (ulimit -d)", &least);
  return least;
}

}  // namespace mlcpipe
