/** An engine that answers from a script, for tests of the page: no GPU, no weights, always the same. */

import { ContextFull, type Engine, type EngineEvents, type EngineProvider, type Finished } from "../../src/engine/engine";
import type { ChatMessage, LoadRequest, Sampling } from "../../src/engine/engine";
import type { Adapter } from "../../src/model/fit";
import { ANSWERS } from "./answers";

/** What a test may set before the page starts, and reach afterwards. */
interface Script {
  adapter?: Partial<Adapter> | null;
  loadError?: string;
  tokenMs?: number;
  loads: LoadRequest[];
  chats: { messages: ChatMessage[]; sampling: Sampling }[];
  lose?: (reason: string) => void;
}

const script: Script = Object.assign({ loads: [], chats: [] }, (globalThis as { scripted?: Partial<Script> }).scripted);
(globalThis as { scripted?: Script }).scripted = script;

const ADAPTER: Adapter = {
  name: "Scripted GPU",
  fallback: false,
  features: ["shader-f16", "subgroups"],
  subgroupSize: 32,
  maxBufferSize: 2 ** 31,
  maxStorageBufferBindingSize: 2 ** 30,
  maxStorageBuffersPerShaderStage: 10,
  maxComputeWorkgroupStorageSize: 32768,
  maxComputeInvocationsPerWorkgroup: 1024,
};

export const provider: EngineProvider = {
  probe: async () => (script.adapter === null ? null : { ...ADAPTER, ...script.adapter }),
  create: (events) => new ScriptedEngine(events),
};

class ScriptedEngine implements Engine {
  private stopped = false;
  private reject: (error: Error) => void = () => undefined;

  constructor(events: EngineEvents) {
    script.lose = (reason) => {
      events.onLost(reason);
      this.reject(new Error("the device was lost"));
    };
  }

  async load(request: LoadRequest, onProgress: (share: number) => void): Promise<void> {
    script.loads.push(request);
    for (const share of [0.2, 0.6, 1]) {
      onProgress(share);
      await this.sleep(30);
    }
    if (script.loadError) throw new Error(script.loadError);
  }

  async chat(messages: ChatMessage[], sampling: Sampling, onText: (text: string) => void): Promise<Finished> {
    script.chats.push({ messages, sampling });
    this.stopped = false;
    const question = messages.at(-1)!.content;
    if (question === "overflow") throw new ContextFull("prompt tokens exceed context window size");
    const answer = ANSWERS[question] ?? `You said: ${question} (${script.chats.length})`;
    let tokens = 0;
    for (const word of answer.match(/\s*\S+\s*/g) ?? []) {
      await this.sleep(script.tokenMs ?? 5);
      if (this.stopped) break;
      onText(word);
      tokens++;
    }
    return {
      reason: this.stopped ? "interrupted" : "stop",
      promptTokens: 24,
      completionTokens: tokens,
      prefillTokensPerSecond: 812.5,
      decodeTokensPerSecond: 41.7,
    };
  }

  stop(): void {
    this.stopped = true;
  }

  dispose(): void {
    this.stopped = true;
    this.reject(new Error("the engine was stopped"));
  }

  private sleep(ms: number): Promise<void> {
    return new Promise((resolve, reject) => {
      this.reject = reject;
      setTimeout(resolve, ms);
    });
  }
}
