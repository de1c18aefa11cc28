#include "commands.h"

#include <algorithm>
#include <cstring>

#include "device.h"

namespace mlcpipe::vulkan {
namespace {

constexpr VkPipelineStageFlags kStages = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
constexpr VkAccessFlags kWrites = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
constexpr VkAccessFlags kAll =
    kWrites | VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_TRANSFER_READ_BIT;

}  // namespace

Commands::Commands(Device& device, VkQueue queue, uint32_t queue_family)
    : device_(device),
      queue_(queue),
      queue_family_(queue_family),
      // A software device uses the host's cores: starting before the host has recorded gains nothing.
      first_limit_(device.adapter().software() ? kLastLimit : kFirstLimit),
      limit_(first_limit_) {}

void Commands::Create() {
  const DeviceFunctions& vk = device_.functions();
  VkSemaphoreTypeCreateInfo type{VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO};
  type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
  VkSemaphoreCreateInfo semaphore{VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, &type, 0};
  device_.Check(vk.CreateSemaphore(device_.handle(), &semaphore, nullptr, &timeline_), "vkCreateSemaphore");
  for (Batch& batch : batches_) {
    VkCommandPoolCreateInfo pool{VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO};
    pool.flags = VK_COMMAND_POOL_CREATE_TRANSIENT_BIT;
    pool.queueFamilyIndex = queue_family_;
    device_.Check(vk.CreateCommandPool(device_.handle(), &pool, nullptr, &batch.pool), "vkCreateCommandPool");
    VkCommandBufferAllocateInfo info{VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO};
    info.commandPool = batch.pool;
    info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    info.commandBufferCount = 1;
    device_.Check(vk.AllocateCommandBuffers(device_.handle(), &info, &batch.commands), "vkAllocateCommandBuffers");
  }
}

Commands::~Commands() {
  const DeviceFunctions& vk = device_.functions();
  for (Batch& batch : batches_) {
    batch.descriptors.Destroy(vk, device_.handle());
    if (batch.pool != VK_NULL_HANDLE) vk.DestroyCommandPool(device_.handle(), batch.pool, nullptr);
  }
  if (timeline_ != VK_NULL_HANDLE) vk.DestroySemaphore(device_.handle(), timeline_, nullptr);
}

VkCommandBuffer Commands::Begin() {
  Batch& batch = batches_[slot_];
  if (recording_) return batch.commands;
  const DeviceFunctions& vk = device_.functions();
  device_.CheckAlive();
  if (!IsDone(batch.value)) device_.Wait(batch.value);
  if (batch.value != 0) batch.descriptors.Reset(vk, device_.handle());
  device_.Check(vk.ResetCommandPool(device_.handle(), batch.pool, 0), "vkResetCommandPool");
  VkCommandBufferBeginInfo info{VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
  info.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
  device_.Check(vk.BeginCommandBuffer(batch.commands, &info), "vkBeginCommandBuffer");
  recording_ = true;
  recorded_ = 0;
  bound_ = VK_NULL_HANDLE;
  return batch.commands;
}

void Commands::Submit() {
  if (!recording_) return;
  const DeviceFunctions& vk = device_.functions();
  Batch& batch = batches_[slot_];
  recording_ = false;  // a failed batch is dropped: its error is raised, and the next batch starts empty
  VkMemoryBarrier to_host{VK_STRUCTURE_TYPE_MEMORY_BARRIER, nullptr, kWrites, VK_ACCESS_HOST_READ_BIT};
  vk.CmdPipelineBarrier(batch.commands, kStages, VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &to_host, 0, nullptr, 0, nullptr);
  device_.Check(vk.EndCommandBuffer(batch.commands), "vkEndCommandBuffer");
  const uint64_t value = next_;
  VkTimelineSemaphoreSubmitInfo timeline{VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO};
  timeline.signalSemaphoreValueCount = 1;
  timeline.pSignalSemaphoreValues = &value;
  VkSubmitInfo info{VK_STRUCTURE_TYPE_SUBMIT_INFO, &timeline};
  info.commandBufferCount = 1;
  info.pCommandBuffers = &batch.commands;
  info.signalSemaphoreCount = 1;
  info.pSignalSemaphores = &timeline_;
  device_.Check(vk.QueueSubmit(queue_, 1, &info, VK_NULL_HANDLE), "vkQueueSubmit");
  batch.value = value;
  ++next_;
  ++counts_.submits;
  slot_ = (slot_ + 1) % kBatches;
  limit_ = std::min(kGrowth * limit_, kLastLimit);
}

bool Commands::IsKnownDone(uint64_t value) const {
  if (!recording_) value = std::min(value, submitted());  // a failed batch never runs
  return value <= done_;
}

bool Commands::IsDone(uint64_t value) {
  if (IsKnownDone(value)) return true;
  Completed();
  return IsKnownDone(value);
}

uint64_t Commands::Completed() {
  if (done_ + 1 < next_) {
    uint64_t value = 0;
    device_.Check(device_.functions().GetSemaphoreCounterValue(device_.handle(), timeline_, &value),
                  "vkGetSemaphoreCounterValue");
    done_ = std::max(done_, value);
  }
  return done_;
}

void Commands::Finished(uint64_t value) { done_ = std::max(done_, value); }

bool Commands::Conflicts(const Buffer* buffer, bool write) const {
  return buffer->write_epoch == epoch_ || (write && buffer->read_epoch == epoch_);
}

void Commands::Mark(Buffer* buffer, bool write) {
  (write ? buffer->write_epoch : buffer->read_epoch) = epoch_;
  buffer->last_use = next_;
}

// One barrier for all memory: for drivers, a barrier for a single buffer costs the same.
void Commands::Barrier() {
  VkMemoryBarrier memory{VK_STRUCTURE_TYPE_MEMORY_BARRIER, nullptr, kWrites, kAll};
  device_.functions().CmdPipelineBarrier(batches_[slot_].commands, kStages, kStages, 0, 1, &memory, 0, nullptr, 0,
                                         nullptr);
  ++epoch_;
  ++counts_.barriers;
}

void Commands::Recorded() {
  if (++recorded_ >= limit_) Submit();
}

void Commands::Dispatch(const Launch& launch) {
  VkCommandBuffer commands = Begin();
  Pipeline& pipeline = *launch.pipeline;
  bool conflict = false;
  for (uint32_t i = 0; i < pipeline.buffers; ++i) conflict |= Conflicts(launch.buffers[i], launch.writes[i]);
  if (conflict) Barrier();
  // Comes before calls that may fail: the batch may refer to the buffers from then on.
  for (uint32_t i = 0; i < pipeline.buffers; ++i) Mark(launch.buffers[i], launch.writes[i]);
  pipeline.last_use = next_;
  Bind(commands, launch);
  Run(commands, launch);
  ++counts_.dispatches;
  Recorded();
}

// One dispatch, or several without barriers: a kernel's workgroups are independent.
void Commands::Run(VkCommandBuffer commands, const Launch& launch) {
  const DeviceFunctions& vk = device_.functions();
  const Pipeline& pipeline = *launch.pipeline;
  const uint32_t most = device_.adapter().limits().maxComputeWorkGroupCount[0];
  for (uint32_t done = 0; done < launch.groups[0];) {
    const uint32_t count = std::min(launch.groups[0] - done, most);
    if (launch.grid_base_offset >= 0) std::memcpy(launch.push_constants + launch.grid_base_offset, &done, sizeof done);
    if (pipeline.push_bytes != 0) {
      vk.CmdPushConstants(commands, pipeline.layout->pipeline, VK_SHADER_STAGE_COMPUTE_BIT, 0, pipeline.push_bytes,
                          launch.push_constants);
    }
    vk.CmdDispatch(commands, count, launch.groups[1], launch.groups[2]);
    done += count;
  }
}

void Commands::Bind(VkCommandBuffer commands, const Launch& launch) {
  const DeviceFunctions& vk = device_.functions();
  const Pipeline& pipeline = *launch.pipeline;
  if (bound_ != pipeline.handle) {
    vk.CmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.handle);
    bound_ = pipeline.handle;
  }
  if (pipeline.buffers == 0) return;
  VkDescriptorSet set = VK_NULL_HANDLE;
  if (!pipeline.layout->push) {
    VkResult result = VK_SUCCESS;
    set = batches_[slot_].descriptors.Take(vk, device_.handle(), pipeline.layout->set, &result);
    device_.Check(result, "vkAllocateDescriptorSets");
  }
  VkDescriptorBufferInfo buffers[kMaxBuffers];
  VkWriteDescriptorSet writes[kMaxBuffers];
  for (uint32_t i = 0; i < pipeline.buffers; ++i) {
    buffers[i] = {launch.buffers[i]->handle, 0, VK_WHOLE_SIZE};
    writes[i] = {VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET, nullptr, set,     i, 0, 1,
                 VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,      nullptr, &buffers[i], nullptr};
  }
  if (set == VK_NULL_HANDLE) {
    vk.CmdPushDescriptorSetKHR(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout->pipeline, 0,
                               pipeline.buffers, writes);
    return;
  }
  vk.UpdateDescriptorSets(device_.handle(), pipeline.buffers, writes, 0, nullptr);
  vk.CmdBindDescriptorSets(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout->pipeline, 0, 1, &set, 0,
                           nullptr);
}

void Commands::Copy(Buffer* from, VkDeviceSize from_offset, Buffer* to, VkDeviceSize to_offset, VkDeviceSize bytes) {
  VkCommandBuffer commands = Begin();
  if (Conflicts(from, false) || Conflicts(to, true)) Barrier();
  VkBufferCopy region{from_offset, to_offset, bytes};
  device_.functions().CmdCopyBuffer(commands, from->handle, to->handle, 1, &region);
  Mark(from, false);
  Mark(to, true);
  ++counts_.copies;
  Recorded();
}

void Commands::Timestamp(VkQueryPool pool, uint32_t query) {
  VkCommandBuffer commands = Begin();
  Barrier();
  const DeviceFunctions& vk = device_.functions();
  vk.CmdResetQueryPool(commands, pool, query, 1);
  vk.CmdWriteTimestamp(commands, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, pool, query);
  Recorded();
}

}  // namespace mlcpipe::vulkan
