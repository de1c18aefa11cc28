/** The model's way from a site's files to the GPU, as phases that the page shows. */

import type { Answering, Engine, EngineProvider } from "../engine/engine";
import { ModelCache } from "../model/cache";
import { download, DownloadFailure } from "../model/download";
import { checkFit, checkStorage, estimateMemory, suggestContext, type Adapter, type MemoryEstimate, type Refusal } from "../model/fit";
import { parseManifest, parseSite, type Choice, type Manifest, type Site } from "../model/manifest";
import { Rate } from "../model/rate";
import type { Settings } from "./settings";
import { Store } from "./store";

export type Phase =
  | { name: "starting" }
  | { name: "unsupported"; text: string }
  | { name: "offer"; refusal: Refusal | null }
  | { name: "downloading"; done: number; total: number; rate: number | null; left: number | null; retryingIn: number | null }
  | { name: "broken"; failure: DownloadFailure; done: number; total: number }
  | { name: "loading"; share: number | null; stage?: string | undefined }
  | { name: "ready" }
  | { name: "lost"; reason: string; whileLoading: boolean }
  | { name: "elsewhere" }
  | { name: "key"; wrong: boolean }
  | { name: "failed"; message: string };

export interface Storage {
  usage: number;
  quota: number;
  persisted: boolean;
}

export interface ModelState {
  phase: Phase;
  title: string;
  /** Whether questions may have pictures. */
  sees: boolean;
  adapter: Adapter | null;
  manifest: Manifest | null;
  contextTokens: number;
  estimate: MemoryEstimate | null;
  /** Bytes still to fetch. */
  missing: number;
  storage: Storage | null;
}

export const EMPTY: ModelState = {
  phase: { name: "starting" },
  title: "",
  sees: false,
  adapter: null,
  manifest: null,
  contextTokens: 0,
  estimate: null,
  missing: 0,
  storage: null,
};

/** Where answers come from: a model in this browser, or a server. */
export interface ModelSource {
  readonly state: Store<ModelState>;
  readonly engine: Answering | null;
  /** Called when the engine went away while it may have been answering. */
  onEngineGone: (reason: string) => void;
  start(): Promise<void>;
}

const UNSUPPORTED =
  "This browser offers no WebGPU. It runs in Chrome and Edge 113 or later, in Safari 26 or later, and in Firefox 141 or later " +
  "on Windows and 145 on Apple silicon; on Linux it may have to be switched on. The page must be opened over https or from this computer.";

export class ModelController implements ModelSource {
  readonly state = new Store<ModelState>(EMPTY);
  engine: Engine | null = null;
  onEngineGone: (reason: string) => void = () => undefined;

  private cache: ModelCache | null = null;
  private site: Site | null = null;
  private stopDownload: AbortController | null = null;
  private stopWaiting: AbortController | null = null;
  private releaseEngine: (() => void) | null = null;
  private readonly channel: BroadcastChannel;

  constructor(
    private readonly provider: EngineProvider,
    private readonly settings: Store<Settings>,
    private readonly base: string,
  ) {
    this.channel = new BroadcastChannel(`mlcpipe-download ${base}`);
    this.channel.onmessage = ({ data }) => this.followOtherTab(data as Phase);
    addEventListener("online", () => {
      const { phase } = this.state.get();
      if (phase.name === "broken" && phase.failure.kind === "network") void this.download();
    });
  }

  /** Find the model and the device; continue automatically until the user must decide. */
  async start(): Promise<void> {
    try {
      this.phase({ name: "starting" });
      this.site = parseSite(await this.json("site.json"));
      this.state.patch({ title: this.site.title });
      const adapter = await this.provider.probe();
      if (!adapter) return this.phase({ name: "unsupported", text: UNSUPPORTED });
      const choice = choose(this.site.choices, adapter);
      if (!choice) return this.phase({ name: "unsupported", text: lacking(this.site.choices, adapter) });
      const base = new URL(choice.path.replace(/\/?$/, "/"), this.base).href;
      const manifest = parseManifest(await this.json(new URL("mlcpipe.json", base).href), choice.library);
      this.cache = new ModelCache(caches, base, manifest);
      this.state.patch({ adapter, manifest });
      await this.offer();
      const { phase, missing } = this.state.get();
      const free = phase.name === "offer" && phase.refusal === null;
      if (free && missing === 0) await this.load();
      else if (free && this.site.autostart) await this.download();
    } catch (error) {
      this.phase({ name: "failed", message: words(error) });
    }
  }

  /** Set another context length, which the engine gets when it is loaded again. */
  async setContext(tokens: number | null): Promise<void> {
    this.settings.patch({ contextTokens: tokens });
    const { phase } = this.state.get();
    if (["ready", "lost", "failed"].includes(phase.name)) {
      this.dropEngine("The context length was changed.");
      await this.offer();
      await this.load();
    } else if (phase.name === "offer") await this.offer();
  }

  /** Fetch what is missing, then load. Once for all tabs: the others wait and show the same progress. */
  async download(): Promise<void> {
    const cache = this.cache!;
    if (this.stopDownload) return;
    const stop = (this.stopDownload = new AbortController());
    const total = cache.manifest.totalBytes;
    let done = total - this.state.get().missing;
    const rate = new Rate();
    this.phase({ name: "downloading", done, total, rate: null, left: null, retryingIn: null });
    try {
      await this.askForStorage();
      await navigator.locks.request(`mlcpipe-download ${cache.base}`, { signal: stop.signal }, () =>
        download(cache, {
          fetch: fetch.bind(globalThis),
          storage: caches,
          signal: stop.signal,
          onProgress: (progress) => {
            done = progress.done;
            rate.add(performance.now(), done);
            const phase: Phase = { name: "downloading", ...progress, rate: rate.perSecond(), left: rate.left(total) };
            this.phase(phase);
            this.channel.postMessage(phase);
          },
        }),
      );
    } catch (error) {
      if (!stop.signal.aborted && !(error instanceof DownloadFailure)) return this.phase({ name: "failed", message: words(error) });
      const failure = error instanceof DownloadFailure ? error : new DownloadFailure("stopped", "The download was stopped.");
      return this.phase({ name: "broken", failure, done, total });
    } finally {
      this.stopDownload = null;
      await this.measureStorage();
    }
    await this.load();
  }

  pauseDownload(): void {
    this.stopDownload?.abort();
  }

  /** Put the model on the GPU, unless another tab has it there. */
  async load(takeOver = false): Promise<void> {
    this.stopWaiting?.abort();
    if (this.releaseEngine) return this.loadHere();
    const lock = `mlcpipe-engine ${this.base}`;
    const hold = async (granted: Lock | null): Promise<void> => {
      if (!granted) return this.waitForEngine(lock, hold);
      const released = new Promise<void>((resolve) => (this.releaseEngine = resolve));
      void this.loadHere();
      await released;
    };
    navigator.locks.request(lock, takeOver ? { steal: true } : { ifAvailable: true }, hold).catch((error: unknown) => this.engineStolen(error));
  }

  /** Hash the stored files again. -> a message with the result */
  async verify(onShare: (share: number) => void): Promise<string> {
    const cache = this.cache!;
    const bad = await cache.verify((done) => onShare(done / cache.manifest.totalBytes));
    await this.measureStorage();
    if (bad.length === 0) return `All ${cache.manifest.files.length} files are as published.`;
    await this.offer();
    return `Damaged and removed: ${bad.map((file) => file.path).join(", ")}. Download them again.`;
  }

  /** Remove the model from this browser; conversations stay. */
  async remove(): Promise<void> {
    this.dropEngine("The model was removed.");
    this.releaseEngine?.();
    this.releaseEngine = null;
    await this.cache!.remove();
    await this.offer();
  }

  private async offer(): Promise<void> {
    const { manifest, adapter } = this.state.get();
    if (!manifest || !adapter) return;
    const memory = deviceMemory();
    const requested = this.settings.get().contextTokens ?? suggestContext(manifest, memory);
    const contextTokens = Math.min(requested, manifest.contextLength);
    const estimate = estimateMemory(manifest, contextTokens);
    const missing = (await this.cache!.missing()).reduce((sum, file) => sum + file.bytes, 0);
    const quota = await this.measureStorage();
    this.state.patch({ contextTokens, estimate, missing });
    const refusal = checkFit(manifest, adapter, estimate, memory) ?? (missing > 0 ? checkStorage(missing, quota) : null);
    this.phase({ name: "offer", refusal });
  }

  private async loadHere(): Promise<void> {
    const { manifest, contextTokens } = this.state.get();
    this.dropEngine("The model is loaded again.");
    this.phase({ name: "loading", share: 0 });
    const engine: Engine = (this.engine = this.provider.create({ onLost: (reason) => this.lost(engine, reason) }));
    try {
      const library = await this.cache!.blob(manifest!.library);
      const request = { kvCache: manifest!.kvCache, modelUrl: this.cache!.keyBase, library, contextTokens };
      await engine.load(request, (share) => this.engine === engine && this.phase({ name: "loading", share }));
      if (this.engine === engine) {
        this.state.patch({ missing: 0 });
        this.phase({ name: "ready" });
      }
    } catch (error) {
      if (this.engine !== engine) return; // lost or moved: that has been said
      this.dropEngine("");
      const missing = await this.cache!.missing();
      if (missing.length > 0) return this.offer();
      this.phase({ name: "failed", message: `The engine could not load the model: ${words(error)}` });
    }
  }

  private lost(engine: Engine, reason: string): void {
    if (this.engine !== engine) return;
    const whileLoading = this.state.get().phase.name === "loading";
    this.dropEngine("The GPU was lost before the answer was complete.");
    this.phase({ name: "lost", reason, whileLoading });
  }

  private dropEngine(reason: string): void {
    const engine = this.engine;
    this.engine = null;
    engine?.dispose();
    if (engine) this.onEngineGone(reason);
  }

  private waitForEngine(lock: string, hold: (granted: Lock | null) => Promise<void>): void {
    this.phase({ name: "elsewhere" });
    const stop = (this.stopWaiting = new AbortController());
    // The other tab closed: continue here.
    navigator.locks.request(lock, { signal: stop.signal }, hold).catch((error: unknown) => {
      if (!stop.signal.aborted) this.engineStolen(error);
    });
  }

  private engineStolen(error: unknown): void {
    this.releaseEngine = null;
    this.dropEngine("The model moved to another tab before the answer was complete.");
    if (error instanceof DOMException && error.name === "AbortError") void this.load();
    else this.phase({ name: "failed", message: words(error) });
  }

  private followOtherTab(phase: Phase): void {
    const { name } = this.state.get().phase;
    if (phase.name !== "downloading" || !(name === "downloading" || name === "offer" || name === "broken")) return;
    if (name !== "downloading") void this.download();
    else this.phase(phase);
  }

  private async askForStorage(): Promise<void> {
    // Without it the browser may remove the model when the disk gets full; a refusal costs a download then.
    await navigator.storage?.persist?.();
    await this.measureStorage();
  }

  private async measureStorage(): Promise<StorageEstimate> {
    const quota = (await navigator.storage?.estimate?.()) ?? {};
    const persisted = (await navigator.storage?.persisted?.()) ?? false;
    if (quota.usage !== undefined && quota.quota !== undefined) {
      this.state.patch({ storage: { usage: quota.usage, quota: quota.quota, persisted } });
    }
    return quota;
  }

  private async json(path: string): Promise<unknown> {
    const url = new URL(path, this.base);
    const response = await fetch(url, { cache: "no-cache" });
    if (!response.ok) throw new Error(`${url.pathname} cannot be read: the server answers ${response.status}`);
    return response.json();
  }

  private phase(phase: Phase): void {
    this.state.patch({ phase });
  }
}

/** The first choice whose features the GPU has, and its subgroup size if it needs one. */
export function choose(choices: Choice[], adapter: Adapter): Choice | null {
  const runs = ({ features, subgroupSize }: Choice): boolean =>
    features.every((feature) => adapter.features.includes(feature)) &&
    (subgroupSize === null || subgroupSize === adapter.subgroupSize);
  return choices.find(runs) ?? null;
}

function lacking(choices: Choice[], adapter: Adapter): string {
  const features = [...new Set(choices.flatMap((c) => c.features))].filter((f) => !adapter.features.includes(f));
  const sizes = choices.flatMap((c) => (c.subgroupSize === null ? [] : [`subgroups of ${c.subgroupSize}`]));
  return (
    `${adapter.name} has no ${(features.length ? features : sizes).join(", ")}, which this site's model needs. A version in float32 runs on every GPU: ` +
    "whoever made the site can add one."
  );
}

/** Bytes; the browser rounds, and few tell. */
function deviceMemory(): number | null {
  const gib = (navigator as { deviceMemory?: number }).deviceMemory;
  return gib === undefined ? null : gib * 2 ** 30;
}

export function words(error: unknown): string {
  if (error instanceof TypeError && /fetch/i.test(error.message)) return "The server cannot be reached. Check the connection and reload the page.";
  return error instanceof Error ? error.message || error.name : String(error);
}
