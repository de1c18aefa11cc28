/** Runs an engine. A worker, so that reading, compiling and sampling never hold up the page, and ending it frees all. */

import type { Answering, LoadRequest } from "./engine";
import { Pipelines } from "./pipelines";
import type { FromWorker, ToWorker } from "./protocol";

/** From a model that is loaded to the pipelines that its first answer does not need, unless that comes before. */
const IDLE_MS = 1000;
const post = (message: FromWorker): void => self.postMessage(message);

let engine: Answering | undefined;
const pipelines = new Pipelines(GPUComputePassEncoder.prototype);

self.onmessage = async ({ data }: MessageEvent<ToWorker>): Promise<void> => {
  try {
    if (data.type === "load") await load(data.request);
    else if (data.type === "chat") {
      const finished = await engine!.chat(data.messages, data.sampling, (text) => post({ type: "text", text }));
      post({ type: "finished", finished });
    } else engine?.stop();
  } catch (error) {
    const { name, message } = error instanceof Error ? error : new Error(String(error));
    post({ type: "error", name, message });
  }
};

// tvmjs unloads in silence when the GPU is lost: listen on every device that it gets.
const requestDevice = GPUAdapter.prototype.requestDevice;
GPUAdapter.prototype.requestDevice = async function (this: GPUAdapter, descriptor?: GPUDeviceDescriptor) {
  const device = await requestDevice.call(this, descriptor);
  pipelines.watch(device);
  void device.lost.then(({ reason, message }) => post({ type: "lost", reason: message || reason || "no reason given" }));
  return device;
};

/** The engine that a bundle's library is for; the page fetches that one alone. */
async function load(request: LoadRequest): Promise<void> {
  const onProgress = (share: number): void => post({ type: "progress", share });
  if (request.kvCache === "pages") {
    const { PagesEngine } = await import("./pages/engine");
    const read = (path: string) => stored(new URL(path, request.modelUrl).href, path);
    engine = await PagesEngine.load(await request.library.arrayBuffer(), read, request.contextTokens, onProgress);
  } else {
    const { WebLlm } = await import("./webllm");
    engine = await WebLlm.load(request, pipelines, onProgress);
  }
  post({ type: "loaded" });
  setTimeout(() => void pipelines.make().catch(() => undefined), IDLE_MS); // an answer says what went wrong
}

async function stored(url: string, path: string): Promise<ArrayBuffer> {
  const file = await caches.match(url);
  if (!file) throw new Error(`${path} is no longer in the browser's storage`);
  return file.arrayBuffer();
}
