/** The model of a server: its state, its load, and its key. */

import { ask, HttpEngine, ServerError } from "../engine/http";
import { EMPTY, words, type ModelSource, type ModelState, type Phase } from "./model";
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
  sees: boolean;
  /** Of a server of several: those that write text. */
  models?: ServedModel[];
  /** Of all answers, since the last look. */
  perSecond: number;
}

export interface ServedModel {
  model: string;
  state: "unloaded" | "loading" | "ready" | "unloading" | "failed";
  progress?: { stage: string; share: number | null };
  error?: string;
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
    this.engine = new HttpEngine(base, () => this.key, () => this.chosen);
  }

  /** The model that the user chose, null for the server's first. */
  get chosen(): string | null {
    return this.storage.getItem("mlcpipe-model");
  }

  async choose(model: string): Promise<void> {
    this.storage.setItem("mlcpipe-model", model);
    this.facts.set(null);
    await this.start();
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
    clearTimeout(this.timer); // of a look that began meanwhile
    this.timer = setTimeout(() => void this.start(), LOOK_EVERY_MS);
  }

  private async look(): Promise<void> {
    const chosen = this.chosen;
    const query = chosen === null ? "" : `?model=${encodeURIComponent(chosen)}`;
    try {
      const facts = (await (await ask(`${this.base}status${query}`, this.key)).json()) as ServerFacts;
      if (chosen !== this.chosen) return;
      const [now, before] = [performance.now(), this.facts.get()];
      const tokens = before ? facts.generated_tokens - before.generated_tokens : 0;
      this.facts.set({ ...facts, perSecond: Math.max(0, tokens / ((now - this.looked) / 1000)) });
      this.looked = now;
      const loading = facts.models?.find(({ model, state }) => model === facts.model && state === "loading");
      const phase: Phase = loading ? { name: "loading", share: loading.progress?.share ?? null, stage: loading.progress?.stage } : { name: "ready" };
      this.state.patch({ phase, title: facts.model, contextTokens: facts.context_length, sees: facts.sees });
    } catch (error) {
      const status = error instanceof ServerError ? error.status : 0;
      if (status === 404 && chosen !== null) this.storage.removeItem("mlcpipe-model"); // the server has others now
      else if (status === 401) this.state.patch({ phase: { name: "key", wrong: this.key !== "" } });
      else if (status === 503) this.state.patch({ phase: { name: "loading", share: 0 } });
      else this.state.patch({ phase: { name: "failed", message: words(error) } });
    }
  }
}
