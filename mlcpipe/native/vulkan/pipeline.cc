#include "pipeline.h"

#include <vector>

namespace mlcpipe::vulkan {

Pipelines::Pipelines(const Adapter& adapter, const DeviceFunctions& functions, VkDevice device,
                     const std::string& folder)
    : adapter_(adapter), functions_(functions), device_(device), cache_(adapter, functions, device, folder) {}

Pipelines::~Pipelines() {
  for (auto& [key, layout] : layouts_) {
    functions_.DestroyPipelineLayout(device_, layout.pipeline, nullptr);
    functions_.DestroyDescriptorSetLayout(device_, layout.set, nullptr);
  }
}

VkResult Pipelines::FindLayout(uint32_t buffers, uint32_t push_bytes, const Layout** out, const char** call) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto known = layouts_.find({buffers, push_bytes});
  if (known != layouts_.end()) {
    *out = &known->second;
    return VK_SUCCESS;
  }
  std::vector<VkDescriptorSetLayoutBinding> bindings(buffers);
  for (uint32_t i = 0; i < buffers; ++i) {
    bindings[i] = {i, VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1, VK_SHADER_STAGE_COMPUTE_BIT, nullptr};
  }
  Layout layout;
  layout.push = functions_.CmdPushDescriptorSetKHR != nullptr && buffers <= adapter_.max_push_descriptors();
  VkDescriptorSetLayoutCreateInfo set{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO};
  set.flags = layout.push ? VK_DESCRIPTOR_SET_LAYOUT_CREATE_PUSH_DESCRIPTOR_BIT_KHR : 0;
  set.bindingCount = buffers;
  set.pBindings = bindings.data();
  *call = "vkCreateDescriptorSetLayout";
  VkResult result = functions_.CreateDescriptorSetLayout(device_, &set, nullptr, &layout.set);
  if (result != VK_SUCCESS) return result;
  VkPushConstantRange range{VK_SHADER_STAGE_COMPUTE_BIT, 0, push_bytes};
  VkPipelineLayoutCreateInfo info{VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO};
  info.setLayoutCount = 1;
  info.pSetLayouts = &layout.set;
  info.pushConstantRangeCount = push_bytes == 0 ? 0 : 1;
  info.pPushConstantRanges = &range;
  *call = "vkCreatePipelineLayout";
  result = functions_.CreatePipelineLayout(device_, &info, nullptr, &layout.pipeline);
  if (result != VK_SUCCESS) {
    functions_.DestroyDescriptorSetLayout(device_, layout.set, nullptr);
    return result;
  }
  *out = &layouts_.emplace(std::make_pair(buffers, push_bytes), layout).first->second;
  return VK_SUCCESS;
}

VkResult Pipelines::Create(const PipelineSpec& spec, Pipeline* pipeline, const char** call) {
  VkResult result = FindLayout(spec.buffers, spec.push_bytes, &pipeline->layout, call);
  if (result != VK_SUCCESS) return result;
  VkShaderModuleCreateInfo code{VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO};
  code.codeSize = spec.code_bytes;
  code.pCode = spec.code;
  VkShaderModule shader = VK_NULL_HANDLE;
  *call = "vkCreateShaderModule";
  result = functions_.CreateShaderModule(device_, &code, nullptr, &shader);
  if (result != VK_SUCCESS) return result;
  VkPipelineShaderStageRequiredSubgroupSizeCreateInfo required{
      VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO};
  required.requiredSubgroupSize = spec.subgroup_size;
  VkComputePipelineCreateInfo info{VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO};
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  info.stage.module = shader;
  info.stage.pName = spec.entry.c_str();
  if (spec.subgroup_size != 0 && adapter_.can_require_subgroup_size()) info.stage.pNext = &required;
  if (spec.full_subgroups && adapter_.features().count("computeFullSubgroups")) {
    info.stage.flags = VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT;
  }
  info.layout = pipeline->layout->pipeline;
  *call = "vkCreateComputePipelines";
  result = functions_.CreateComputePipelines(device_, cache_.handle(), 1, &info, nullptr, &pipeline->handle);
  functions_.DestroyShaderModule(device_, shader, nullptr);
  pipeline->buffers = spec.buffers;
  pipeline->push_bytes = spec.push_bytes;
  return result;
}

}  // namespace mlcpipe::vulkan
