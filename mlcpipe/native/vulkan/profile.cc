#include "profile.h"

#include "device.h"

namespace mlcpipe::vulkan {

Profile::~Profile() {
  if (pool_ != VK_NULL_HANDLE) device_.functions().DestroyQueryPool(device_.handle(), pool_, nullptr);
}

void Profile::Create() {
  VkQueryPoolCreateInfo info{VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO};
  info.queryType = VK_QUERY_TYPE_TIMESTAMP;
  info.queryCount = kMarks;
  device_.Check(device_.functions().CreateQueryPool(device_.handle(), &info, nullptr, &pool_), "vkCreateQueryPool");
}

void Profile::Dispatch(const Launch& launch) {
  if (2 * names_.size() == kMarks) Read();
  const auto mark = static_cast<uint32_t>(2 * names_.size());
  Commands& commands = device_.commands();
  commands.Timestamp(pool_, mark);
  commands.Dispatch(launch);
  commands.Timestamp(pool_, mark + 1);
  names_.push_back(launch.pipeline->name);
}

const std::map<std::string, KernelTime>& Profile::Read() {
  Commands& commands = device_.commands();
  commands.Submit();
  device_.Wait(commands.submitted());
  std::vector<uint64_t> ticks(2 * names_.size());
  if (!names_.empty()) {
    const auto count = static_cast<uint32_t>(ticks.size());
    device_.Check(device_.functions().GetQueryPoolResults(device_.handle(), pool_, 0, count, count * sizeof ticks[0],
                                                          ticks.data(), sizeof ticks[0],
                                                          VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
                  "vkGetQueryPoolResults");
  }
  const double period = device_.adapter().limits().timestampPeriod;
  for (size_t i = 0; i < names_.size(); ++i) {
    KernelTime& time = times_[names_[i]];
    ++time.calls;
    time.nanoseconds += static_cast<int64_t>(static_cast<double>(ticks[2 * i + 1] - ticks[2 * i]) * period);
  }
  names_.clear();
  return times_;
}

}  // namespace mlcpipe::vulkan
