/** Messages between the page and the worker with the engine. */

import type { ChatMessage, Finished, LoadRequest, Sampling } from "./engine";

export type ToWorker =
  | { type: "load"; request: LoadRequest }
  | { type: "chat"; messages: ChatMessage[]; sampling: Sampling }
  | { type: "stop" };

export type FromWorker =
  | { type: "progress"; share: number }
  | { type: "loaded" }
  | { type: "text"; text: string }
  | { type: "finished"; finished: Finished }
  | { type: "error"; name: string; message: string }
  | { type: "lost"; reason: string };
