/** Runs WebLLM. A worker, so that reading, compiling and sampling never hold up the page, and ending it frees all. */

import { MLCEngine, type ChatCompletionMessageParam } from "@mlc-ai/web-llm";
import { ControlTokens, controlTokens, type Encoder } from "./control";
import type { ChatMessage, Finished, LoadRequest, Sampling } from "./engine";
import { MODEL_CACHE } from "../model/cache";
import { Pipelines } from "./pipelines";
import type { FromWorker, ToWorker } from "./protocol";

const MODEL_ID = "model";
/** From a model that is loaded to the pipelines that its first answer does not need, unless that comes before. */
const IDLE_MS = 1000;
const post = (message: FromWorker): void => self.postMessage(message);

let engine: MLCEngine | undefined;
let control = new ControlTokens([]);
let interrupted = false;
const pipelines = new Pipelines(GPUComputePassEncoder.prototype);

self.onmessage = async ({ data }: MessageEvent<ToWorker>): Promise<void> => {
  try {
    if (data.type === "load") await load(data.request);
    else if (data.type === "chat") await chat(data.messages, data.sampling);
    else stop();
  } catch (error) {
    const { name, message } = error instanceof Error ? error : new Error(String(error));
    post({ type: "error", name, message });
  }
};

// WebLLM unloads in silence when the GPU is lost: listen on every device that it gets.
const requestDevice = GPUAdapter.prototype.requestDevice;
GPUAdapter.prototype.requestDevice = async function (this: GPUAdapter, descriptor?: GPUDeviceDescriptor) {
  const device = await requestDevice.call(this, descriptor);
  pipelines.watch(device);
  void device.lost.then(({ reason, message }) => post({ type: "lost", reason: message || reason || "no reason given" }));
  return device;
};

async function load(request: LoadRequest): Promise<void> {
  const library = URL.createObjectURL(request.library);
  try {
    engine = new MLCEngine({
      appConfig: { model_list: [record(request, library)], cacheBackend: "cache" },
      logLevel: "WARN",
      initProgressCallback: ({ progress }) => post({ type: "progress", share: progress }),
    });
    await engine.reload(MODEL_ID);
    control = await watchTokenizer(engine, request.modelUrl);
    post({ type: "loaded" });
    setTimeout(() => void pipelines.make().catch(() => undefined), IDLE_MS); // an answer says what went wrong
  } finally {
    URL.revokeObjectURL(library);
  }
}

/** WebLLM's private parts: the tokenizer of the loaded model, and the tokens that end an answer. */
interface Loaded {
  loadedModelIdToPipeline: Map<string, { tokenizer: Encoder; conversation: { config: { stop_token_ids?: number[] } } }>;
}

async function watchTokenizer(loaded: MLCEngine, modelUrl: string): Promise<ControlTokens> {
  const { tokenizer, conversation } = (loaded as unknown as Loaded).loadedModelIdToPipeline.get(MODEL_ID)!;
  const file = await (await caches.open(MODEL_CACHE)).match(new URL("tokenizer.json", modelUrl).href);
  if (!file) throw new Error("tokenizer.json is no longer in the browser's storage");
  const tokens = new ControlTokens(controlTokens(await file.json(), conversation.config.stop_token_ids ?? []));
  tokens.watch(tokenizer);
  return tokens;
}

function record(request: LoadRequest, library: string) {
  const overrides = { context_window_size: request.contextTokens };
  return { model: request.modelUrl, model_id: MODEL_ID, model_lib: library, overrides };
}

async function chat(messages: ChatMessage[], sampling: Sampling): Promise<void> {
  interrupted = false;
  const chunks = await engine!.chat.completions.create({
    messages: control.mark(messages) as ChatCompletionMessageParam[],
    stream: true,
    stream_options: { include_usage: true },
    temperature: sampling.temperature,
    top_p: sampling.topP,
    max_tokens: sampling.maxTokens,
    repetition_penalty: sampling.repetitionPenalty,
    presence_penalty: sampling.presencePenalty,
    frequency_penalty: sampling.frequencyPenalty,
    ...(sampling.seed === null ? {} : { seed: sampling.seed }),
  });
  let reason = "stop";
  let usage: { prompt_tokens: number; completion_tokens: number; extra?: Record<string, unknown> } | undefined;
  for await (const chunk of chunks) {
    const choice = chunk.choices[0];
    if (choice?.delta.content) post({ type: "text", text: choice.delta.content });
    await pipelines.make();
    if (choice?.finish_reason) reason = choice.finish_reason;
    if (chunk.usage) usage = chunk.usage as unknown as NonNullable<typeof usage>;
  }
  const speed = (name: string): number | null => {
    const value = usage?.extra?.[name];
    return typeof value === "number" && Number.isFinite(value) && value > 0 ? value : null;
  };
  const finished: Finished = {
    reason: interrupted ? "interrupted" : reason === "length" ? "length" : "stop",
    promptTokens: usage?.prompt_tokens ?? 0,
    completionTokens: usage?.completion_tokens ?? 0,
    prefillTokensPerSecond: speed("prefill_tokens_per_s"),
    decodeTokensPerSecond: speed("decode_tokens_per_s"),
  };
  post({ type: "finished", finished });
}

function stop(): void {
  interrupted = true;
  void engine?.interruptGenerate();
}
