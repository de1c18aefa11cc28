/** WebLLM as an engine of the worker, for libraries over TVM's cache. */

import { MLCEngine, type ChatCompletionMessageParam } from "@mlc-ai/web-llm";
import { MODEL_CACHE } from "../model/cache";
import { ControlTokens, controlTokens, type Encoder } from "./control";
import type { Answering, ChatMessage, Finished, LoadRequest, Sampling } from "./engine";
import type { Pipelines } from "./pipelines";

const MODEL_ID = "model";

/** WebLLM's private parts: the tokenizer of the loaded model, and the tokens that end an answer. */
interface Loaded {
  loadedModelIdToPipeline: Map<string, { tokenizer: Encoder; conversation: { config: { stop_token_ids?: number[] } } }>;
}

export class WebLlm implements Answering {
  private interrupted = false;

  private constructor(
    private readonly engine: MLCEngine,
    private readonly control: ControlTokens,
    private readonly pipelines: Pipelines,
  ) {}

  static async load(request: LoadRequest, pipelines: Pipelines, onProgress: (share: number) => void): Promise<WebLlm> {
    const library = URL.createObjectURL(request.library);
    try {
      const engine = new MLCEngine({
        appConfig: { model_list: [record(request, library)], cacheBackend: "cache" },
        logLevel: "WARN",
        initProgressCallback: ({ progress }) => onProgress(progress),
      });
      await engine.reload(MODEL_ID);
      return new WebLlm(engine, await watchTokenizer(engine, request.modelUrl), pipelines);
    } finally {
      URL.revokeObjectURL(library);
    }
  }

  async chat(messages: ChatMessage[], sampling: Sampling, onText: (text: string) => void): Promise<Finished> {
    this.interrupted = false;
    const chunks = await this.engine.chat.completions.create({
      messages: this.control.mark(messages) as ChatCompletionMessageParam[],
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
      if (choice?.delta.content) onText(choice.delta.content);
      await this.pipelines.make();
      if (choice?.finish_reason) reason = choice.finish_reason;
      if (chunk.usage) usage = chunk.usage as unknown as NonNullable<typeof usage>;
    }
    const speed = (name: string): number | null => {
      const value = usage?.extra?.[name];
      return typeof value === "number" && Number.isFinite(value) && value > 0 ? value : null;
    };
    return {
      reason: this.interrupted ? "interrupted" : reason === "length" ? "length" : "stop",
      promptTokens: usage?.prompt_tokens ?? 0,
      completionTokens: usage?.completion_tokens ?? 0,
      prefillTokensPerSecond: speed("prefill_tokens_per_s"),
      decodeTokensPerSecond: speed("decode_tokens_per_s"),
    };
  }

  stop(): void {
    this.interrupted = true;
    void this.engine.interruptGenerate();
  }
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
