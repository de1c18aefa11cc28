// Apple's Metal, for gpu.h. Compiled with -fobjc-arc: handles are retained objects.
#include "gpu.h"

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

namespace mlcpipe::metal {
namespace {

std::string Words(NSError* error) { return error ? error.localizedDescription.UTF8String : "no reason is known"; }

NSString* Text(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }

MTLSize SizeOf(const size_t size[3]) { return MTLSizeMake(size[0], size[1], size[2]); }

class MetalGpu final : public Gpu {
 public:
  explicit MetalGpu(id<MTLDevice> device) : device_(device), queue_([device newCommandQueue]) {
    info_.name = device.name.UTF8String;
    info_.system = NSProcessInfo.processInfo.operatingSystemVersionString.UTF8String;
    info_.memory_bytes = device.recommendedMaxWorkingSetSize;
    info_.max_buffer_bytes = device.maxBufferLength;
    info_.shared_bytes = device.maxThreadgroupMemoryLength;
  }

  const GpuInfo& info() const final { return info_; }

  uint64_t free_bytes() const final {
    const uint64_t used = device_.currentAllocatedSize;
    return used < info_.memory_bytes ? info_.memory_bytes - used : 0;
  }

  Memory Allocate(size_t bytes) final {
    @autoreleasepool {
      id<MTLBuffer> buffer = [device_ newBufferWithLength:bytes options:MTLResourceStorageModeShared];
      if (!buffer) return {};
      char* contents = static_cast<char*>(buffer.contents);
      return {(__bridge_retained void*)buffer, contents};
    }
  }

  Pipeline Compile(const std::string& kernel, const std::string& source, std::string* problem) final {
    @autoreleasepool {
      NSError* error = nil;
      id<MTLComputePipelineState> state = nil;
      id<MTLLibrary> library = [device_ newLibraryWithSource:Text(source) options:nil error:&error];
      id<MTLFunction> function = [library newFunctionWithName:Text(kernel)];
      if (function) state = [device_ newComputePipelineStateWithFunction:function error:&error];
      if (!state) {
        *problem = Words(error);
        return {};
      }
      const size_t max_threads = state.maxTotalThreadsPerThreadgroup;
      return {(__bridge_retained void*)state, max_threads};
    }
  }

  void Release(void* object) final { (void)(__bridge_transfer id)object; }

  void Dispatch(const Launch& launch) final {
    @autoreleasepool {
      if (!encoder_) encoder_ = [Commands() computeCommandEncoder];  // its commands run one after the other
      [encoder_ setComputePipelineState:(__bridge id<MTLComputePipelineState>)launch.pipeline];
      NSUInteger index = 0;
      for (void* buffer : launch.buffers) [encoder_ setBuffer:(__bridge id<MTLBuffer>)buffer offset:0 atIndex:index++];
      if (launch.constant_bytes) [encoder_ setBytes:launch.constants length:launch.constant_bytes atIndex:index];
      [encoder_ dispatchThreadgroups:SizeOf(launch.groups) threadsPerThreadgroup:SizeOf(launch.threads)];
    }
  }

  void Copy(void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes) final {
    @autoreleasepool {
      EndKernels();
      id<MTLBlitCommandEncoder> encoder = [Commands() blitCommandEncoder];
      [encoder copyFromBuffer:(__bridge id<MTLBuffer>)from
                 sourceOffset:from_offset
                     toBuffer:(__bridge id<MTLBuffer>)to
            destinationOffset:to_offset
                         size:bytes];
      [encoder endEncoding];
    }
  }

  void Submit() final {
    @autoreleasepool {
      EndKernels();
      if (!commands_) return;
      [commands_ commit];
      submitted_.push_back(commands_);
      commands_ = nil;
    }
  }

  std::string Wait() final {
    Submit();
    @autoreleasepool {
      std::string problem;
      for (id<MTLCommandBuffer> commands : submitted_) {
        [commands waitUntilCompleted];
        if (commands.status == MTLCommandBufferStatusError && problem.empty()) problem = Words(commands.error);
      }
      submitted_.clear();
      return problem;
    }
  }

 private:
  id<MTLCommandBuffer> Commands() {
    if (!commands_) commands_ = [queue_ commandBuffer];  // it retains what its commands use
    return commands_;
  }

  void EndKernels() {
    [encoder_ endEncoding];
    encoder_ = nil;
  }

  id<MTLDevice> device_;
  id<MTLCommandQueue> queue_;
  id<MTLCommandBuffer> commands_ = nil;
  id<MTLComputeCommandEncoder> encoder_ = nil;
  std::vector<id<MTLCommandBuffer>> submitted_;
  GpuInfo info_;
};

}  // namespace

std::unique_ptr<Gpu> OpenGpu() {
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  return device ? std::make_unique<MetalGpu>(device) : nullptr;
}

}  // namespace mlcpipe::metal
