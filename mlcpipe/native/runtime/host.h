// The machine: its instruction sets, its cores, its free memory.
#ifndef MLCPIPE_RUNTIME_HOST_H_
#define MLCPIPE_RUNTIME_HOST_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

namespace mlcpipe {

// Instruction sets that programs may use, by Linux's names (mlcpipe/host/cpu_features.py). On a CPU with AMX this
// requests its tiles from Linux, for all threads of the process.
const std::set<std::string>& HostFeatures();

// Physical cores that this process may use, at least 1; where cores differ, those with 60 % of the best one's capacity,
// at most 4.
int DefaultThreads();

// Bytes that can be had, and what limits them: "" for the machine itself.
struct FreeMemory {
  int64_t bytes;
  std::string limit;
};

// The least of the machine's free memory and what cgroups and resource limits leave to this process. INT64_MAX where
// the system does not say.
FreeMemory FindFreeMemory();

// Gives memory that was allocated back to the system; it has any numbers when it is used again.
void Discard(void* data, size_t bytes);

// "64 MiB".
std::string SizeWords(int64_t bytes);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_HOST_H_
