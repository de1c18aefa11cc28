/** An engine in a worker of its own, which is ended with it. */

import type { Adapter } from "../model/fit";
import { ContextFull, type Engine, type EngineEvents, type EngineProvider, type Finished, type LoadRequest } from "./engine";
import type { ChatMessage, Sampling } from "./engine";
import type { FromWorker, ToWorker } from "./protocol";

export const provider: EngineProvider = {
  probe,
  create: (events) => new InWorker(events),
};

async function probe(): Promise<Adapter | null> {
  const adapter = await navigator.gpu?.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) return null;
  const { info, limits } = adapter;
  const known = [info.vendor, info.architecture].filter(Boolean).join(" ");
  return {
    name: info.description || info.device || known || "the GPU",
    fallback: info.isFallbackAdapter ?? /swiftshader|llvmpipe|lavapipe/i.test(`${known} ${info.description}`),
    features: [...adapter.features],
    subgroupSize: onlySize(info),
    maxBufferSize: limits.maxBufferSize,
    maxStorageBufferBindingSize: limits.maxStorageBufferBindingSize,
    maxStorageBuffersPerShaderStage: limits.maxStorageBuffersPerShaderStage,
    maxComputeWorkgroupStorageSize: limits.maxComputeWorkgroupStorageSize,
    maxComputeInvocationsPerWorkgroup: limits.maxComputeInvocationsPerWorkgroup,
  };
}

/** Drivers that have subgroups of several sizes choose one for each shader, and nobody can ask for another. */
function onlySize(info: GPUAdapterInfo): number | null {
  const { subgroupMinSize, subgroupMaxSize } = info as { subgroupMinSize?: number; subgroupMaxSize?: number };
  return subgroupMinSize !== undefined && subgroupMinSize === subgroupMaxSize ? subgroupMinSize : null;
}

interface Pending {
  onProgress(share: number): void;
  onText(text: string): void;
  resolve(finished?: Finished): void;
  reject(error: Error): void;
}

class InWorker implements Engine {
  private readonly worker = new Worker(new URL("./worker.ts", import.meta.url), { type: "module", name: "engine" });
  private pending: Pending | null = null;

  constructor(private readonly events: EngineEvents) {
    this.worker.onmessage = ({ data }: MessageEvent<FromWorker>) => this.receive(data);
    this.worker.onerror = (event) => this.fail(new Error(event.message || "the engine could not be started"));
  }

  load(request: LoadRequest, onProgress: (share: number) => void): Promise<void> {
    return this.call({ type: "load", request }, { onProgress }).then(() => undefined);
  }

  async chat(messages: ChatMessage[], sampling: Sampling, onText: (text: string) => void): Promise<Finished> {
    return (await this.call({ type: "chat", messages, sampling }, { onText }))!;
  }

  stop(): void {
    this.send({ type: "stop" });
  }

  dispose(): void {
    this.worker.terminate();
    this.fail(new Error("the engine was stopped"));
  }

  private call(message: ToWorker, listeners: Partial<Pending>): Promise<Finished | undefined> {
    return new Promise((resolve, reject) => {
      const ignore = () => undefined;
      this.pending = { onProgress: ignore, onText: ignore, ...listeners, resolve, reject };
      this.send(message);
    });
  }

  private send(message: ToWorker): void {
    this.worker.postMessage(message);
  }

  private receive(message: FromWorker): void {
    if (message.type === "progress") this.pending?.onProgress(message.share);
    else if (message.type === "text") this.pending?.onText(message.text);
    else if (message.type === "error") this.fail(asError(message));
    else if (message.type === "lost") this.events.onLost(message.reason);
    else {
      const pending = this.pending;
      this.pending = null;
      pending?.resolve(message.type === "finished" ? message.finished : undefined);
    }
  }

  private fail(error: Error): void {
    const pending = this.pending;
    this.pending = null;
    pending?.reject(error);
  }
}

const NOT_FINITE =
  "The model computed numbers that are not finite (NaN), so there is no next word. Load it again; if that does not help, its files or the GPU's driver are at fault.";

export function asError({ name, message }: { name: string; message: string }): Error {
  // Names of error classes do not survive minification: the words do.
  if (/context window size|ContextWindowSizeExceeded/i.test(`${name} ${message}`)) return new ContextFull(message);
  return new Error(/failed to sample a valid token/i.test(message) ? NOT_FINITE : message);
}
