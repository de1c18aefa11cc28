import { describe, expect, it } from "vitest";
import { Pipelines } from "../src/engine/pipelines";

const descriptor = (entryPoint: string) => ({ layout: "auto", compute: { module: {}, entryPoint } }) as GPUComputePipelineDescriptor;

/** A device that notes what it makes, and passes that note what they get. */
function fake() {
  const log: string[] = [];
  const make = (how: string, { compute }: GPUComputePipelineDescriptor) => {
    log.push(`${how} ${compute.entryPoint}`);
    return { name: compute.entryPoint } as unknown as GPUComputePipeline;
  };
  const device = {
    createComputePipelineAsync: async (one: GPUComputePipelineDescriptor) => make("soon", one),
    createComputePipeline: (one: GPUComputePipelineDescriptor) => make("now", one),
  };
  const pass = { setPipeline: (pipeline: GPUComputePipeline) => void log.push(`set ${(pipeline as { name?: string }).name}`) };
  const pipelines = new Pipelines(pass);
  pipelines.watch(device);
  return { log, device, pass, pipelines };
}

describe("pipelines", () => {
  it("are made at once where the first token needs them, later where not", async () => {
    const { log, device, pass, pipelines } = fake();
    const first = await device.createComputePipelineAsync(descriptor("matmul_kernel"));
    const later = await device.createComputePipelineAsync(descriptor("kv_cache_decode_kernel"));
    expect(log).toEqual(["soon matmul_kernel"]);
    await pipelines.make();
    await pipelines.make();
    pass.setPipeline(first);
    pass.setPipeline(later);
    expect(log.slice(1)).toEqual(["soon kv_cache_decode_kernel", "set matmul_kernel", "set kv_cache_decode_kernel"]);
  });

  it("are made by their first use if that comes before", async () => {
    const { log, device, pass, pipelines } = fake();
    const later = await device.createComputePipelineAsync(descriptor("kv_cache_merge_kernel_1"));
    pass.setPipeline(later);
    pass.setPipeline(later);
    expect(log).toEqual(["now kv_cache_merge_kernel_1", "set kv_cache_merge_kernel_1", "set kv_cache_merge_kernel_1"]);
    await pipelines.make();
    expect(log).toHaveLength(3);
  });

  it("that cannot be made are an error", async () => {
    const { device, pipelines } = fake();
    const refuse = async (_: GPUComputePipelineDescriptor): Promise<GPUComputePipeline> => {
      throw new Error("no pipeline");
    };
    const broken = { ...device, createComputePipelineAsync: refuse };
    pipelines.watch(broken);
    await broken.createComputePipelineAsync(descriptor("apply_penalty_inplace_kernel"));
    await expect(pipelines.make()).rejects.toThrow("no pipeline");
  });
});
