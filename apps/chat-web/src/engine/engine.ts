/** The page's interface to an engine: one in a worker (`in_worker.ts`), or a server (`http.ts`). */

import type { Adapter } from "../model/fit";

export interface ChatMessage {
  role: "system" | "user" | "assistant";
  content: string;
  /** data: URLs, shown before the text. */
  pictures?: readonly string[];
}

export interface Sampling {
  temperature: number;
  topP: number;
  maxTokens: number;
  repetitionPenalty: number;
  presencePenalty: number;
  frequencyPenalty: number;
  /** null draws a new one each time. */
  seed: number | null;
}

export interface LoadRequest {
  /** Which engine runs the library: ours (pages), or WebLLM (tvm). */
  kvCache: "pages" | "tvm";
  /** Address under which the engine's caches hold the model's files. */
  modelUrl: string;
  library: Blob;
  contextTokens: number;
}

export interface Finished {
  reason: "stop" | "length" | "interrupted";
  promptTokens: number;
  completionTokens: number;
  prefillTokensPerSecond: number | null;
  decodeTokensPerSecond: number | null;
}

export interface EngineEvents {
  /** The GPU is gone; the engine is of no use any more. */
  onLost(reason: string): void;
}

export interface Answering {
  /** Answer; `onText` gets new text. One at a time. */
  chat(messages: ChatMessage[], sampling: Sampling, onText: (text: string) => void): Promise<Finished>;
  /** End the running answer soon; `chat` then resolves with the text so far. */
  stop(): void;
}

export interface Engine extends Answering {
  /** Put the model on the GPU; `onProgress` gets a share from 0 to 1. */
  load(request: LoadRequest, onProgress: (share: number) => void): Promise<void>;
  /** Free the GPU at once, whatever is running; pending promises are rejected. */
  dispose(): void;
}

export interface EngineProvider {
  /** The GPU the engine would use; null if the browser offers none. */
  probe(): Promise<Adapter | null>;
  create(events: EngineEvents): Engine;
}

/** The conversation is longer than the model's context. */
export class ContextFull extends Error {
  override name = "ContextFull";
}
