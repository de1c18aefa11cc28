/** The model of a server: its state, its load, and its key. */

import { ask, HttpEngine, ServerError } from "../engine/http";
import { EMPTY, words, type ModelSource, type ModelState } from "./model";
import { Store } from "./store";

export interface ServerFacts {
  model: string;
  running: number;
  waiting: number;
  kv_usage: number;
  prompt_tokens: number;
  cached_tokens: number;
  generated_tokens: number;
  context_length: number;
  about: Record<string, string>;
  /** Of all answers, since the last look. */
  perSecond: number;
}

const LOOK_EVERY_MS = 2000;

export class ServerModel implements ModelSource {
  readonly state = new Store<ModelState>(EMPTY);
  readonly facts = new Store<ServerFacts | null>(null);
  readonly engine: HttpEngine;
  onEngineGone: (reason: string) => void = () => undefined;
  private looked = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** `storage` keeps the key until the tab closes. */
  constructor(readonly base: string, private readonly storage: Storage) {
    this.engine = new HttpEngine(base, () => this.key);
  }

  get key(): string {
    return this.storage.getItem("mlcpipe-key") ?? "";
  }

  async setKey(key: string): Promise<void> {
    this.storage.setItem("mlcpipe-key", key.trim());
    await this.start();
  }

  /** Look now, and every two seconds from now on. */
  async start(): Promise<void> {
    clearTimeout(this.timer);
    if (!document.hidden || !this.looked) await this.look();
    this.timer = setTimeout(() => void this.start(), LOOK_EVERY_MS);
  }

  private async look(): Promise<void> {
    try {
      const facts = (await (await ask(`${this.base}status`, this.key)).json()) as ServerFacts;
      const [now, before] = [performance.now(), this.facts.get()];
      const tokens = before ? facts.generated_tokens - before.generated_tokens : 0;
      this.facts.set({ ...facts, perSecond: Math.max(0, tokens / ((now - this.looked) / 1000)) });
      this.looked = now;
      this.state.patch({ phase: { name: "ready" }, title: facts.model, contextTokens: facts.context_length });
    } catch (error) {
      const status = error instanceof ServerError ? error.status : 0;
      if (status === 401) this.state.patch({ phase: { name: "key", wrong: this.key !== "" } });
      else if (status === 503) this.state.patch({ phase: { name: "loading", share: 0 } });
      else this.state.patch({ phase: { name: "failed", message: words(error) } });
    }
  }
}
