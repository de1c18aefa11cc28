/**
 * Pipelines that the first token of an answer does not need are made after it.
 *
 * TVM's runtime has all of a library's kernels compiled before it runs one, which is most of the time from opening the
 * page to the first token. Here those of `LATER` are left to `make`, and to their first use if that comes before.
 */

/** Kernels for attention after the first token or with earlier turns, for edited histories, and for settings. */
const LATER = /^(kv_cache_(decode|merge|prefill_cached|compact|copy_page|read_back)|copy_pages|apply_)/;

interface Device {
  createComputePipelineAsync(descriptor: GPUComputePipelineDescriptor): Promise<GPUComputePipeline>;
  createComputePipeline(descriptor: GPUComputePipelineDescriptor): GPUComputePipeline;
}

interface Pass {
  setPipeline(pipeline: GPUComputePipeline): void;
}

interface Later {
  pipeline?: GPUComputePipeline;
  now(): GPUComputePipeline;
  soon(): Promise<GPUComputePipeline>;
}

export class Pipelines {
  /** By what stands for the pipeline. */
  private readonly later = new Map<GPUComputePipeline, Later>();
  private making: Promise<unknown> | undefined;

  /** `passes`: the prototype of compute passes; its setPipeline gets the pipeline in place of a stand-in. */
  constructor(passes: Pass) {
    const pipelines = this;
    const setPipeline = passes.setPipeline;
    passes.setPipeline = function (this: Pass, pipeline) {
      setPipeline.call(this, pipelines.compiled(pipeline));
    };
  }

  watch(device: Device): void {
    const create = device.createComputePipelineAsync.bind(device);
    device.createComputePipelineAsync = async (descriptor) => {
      if (this.making || !LATER.test(descriptor.compute.entryPoint ?? "")) return create(descriptor);
      const standIn = {} as GPUComputePipeline;
      this.later.set(standIn, { now: () => device.createComputePipeline(descriptor), soon: () => create(descriptor) });
      return standIn;
    };
  }

  /** Compile the remaining pipelines, all at once. Rejects if one fails. */
  async make(): Promise<void> {
    this.making ??= Promise.all([...this.later.values()].map(async (later) => (later.pipeline ??= await later.soon())));
    await this.making;
  }

  private compiled(pipeline: GPUComputePipeline): GPUComputePipeline {
    const later = this.later.get(pipeline);
    return later ? (later.pipeline ??= later.now()) : pipeline;
  }
}
