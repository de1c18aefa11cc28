/**
 * Fetches the files of a bundle so that nothing is lost when the line breaks, and nothing wrong is kept.
 *
 * A file comes in one ranged request from where it stopped; what arrived is stored every few megabytes. A whole file
 * is compared with the SHA-256 of the manifest before the engine can see it.
 */

import { digestOf, PIECES_CACHE, type ModelCache } from "./cache";
import { bytes } from "./format";
import type { BundleFile } from "./manifest";

export type FailureKind = "network" | "missing" | "changed" | "corrupt" | "quota" | "stopped";

/** Why a download ended; the message is for people. Only "network" and "stopped" are worth another try as it is. */
export class DownloadFailure extends Error {
  override name = "DownloadFailure";
  constructor(
    readonly kind: FailureKind,
    message: string,
  ) {
    super(message);
  }
}

export interface DownloadProgress {
  /** Bytes, including those stored before. */
  done: number;
  total: number;
  /** Set while a broken connection is tried again. */
  retryingIn: number | null;
}

export interface DownloadOptions {
  fetch: typeof fetch;
  storage: CacheStorage;
  signal: AbortSignal;
  onProgress: (progress: DownloadProgress) => void;
  /** Bytes after which what arrived is stored. */
  pieceBytes?: number;
  /** Tries in a row without a byte before it gives up. */
  tries?: number;
  /** Milliseconds before the second try; doubles each time. */
  waitMs?: number;
  /** Milliseconds without a byte that count as a broken connection. */
  stallMs?: number;
}

const PARALLEL = 3;
const PIECE_BYTES = 8 << 20;
const TRIES = 6;
const WAIT_MS = 500;
const STALL_MS = 30_000;

/** A connection that may work the next time. */
class Broken extends Error {}

export async function download(model: ModelCache, options: DownloadOptions): Promise<void> {
  const job = new Download(model, options);
  await job.run();
}

class Download {
  private readonly done = new Map<string, number>();
  private readonly abort = new AbortController();
  private retryingIn: number | null = null;
  private pieces!: Cache;

  constructor(
    private readonly model: ModelCache,
    private readonly options: DownloadOptions,
  ) {}

  async run(): Promise<void> {
    this.options.signal.throwIfAborted?.();
    this.options.signal.addEventListener("abort", () => this.abort.abort(), { once: true });
    this.pieces = await this.options.storage.open(PIECES_CACHE);
    const missing = await this.model.missing();
    for (const file of this.model.manifest.files) if (!missing.includes(file)) this.done.set(file.path, file.bytes);
    for (const file of missing) this.done.set(file.path, (await this.stored(file)).reduce((n, p) => n + p.bytes, 0));
    this.report();
    const queue = [...missing];
    const worker = async (): Promise<void> => {
      for (let file = queue.shift(); file && !this.abort.signal.aborted; file = queue.shift()) await this.file(file);
    };
    let first: { error: unknown } | null = null;
    const guarded = () =>
      worker().catch((error: unknown) => {
        first ??= { error };
        this.abort.abort();
      });
    // All of them: one that still runs after a failure would report progress of a download that has ended.
    await Promise.all(Array.from({ length: PARALLEL }, guarded));
    if (first !== null) throw asFailure((first as { error: unknown }).error, this.options.signal);
    await this.model.prune();
  }

  private async file(file: BundleFile): Promise<void> {
    if (await this.model.adopt(file)) {
      this.done.set(file.path, file.bytes);
      return this.report();
    }
    // Twice, as a line or a proxy may have damaged the first; after that the server's copy is wrong.
    for (let last = false; ; last = true) {
      await this.fetchWhole(file);
      const digest = await this.assemble(file);
      if (digest === file.sha256) return;
      await this.forget(file);
      if (last) {
        throw new DownloadFailure(
          "corrupt",
          `${file.path} is not the file that was published: its SHA-256 begins with ${digest.slice(0, 12)}, ` +
            `the manifest says ${file.sha256.slice(0, 12)}. It was fetched twice, refused and removed.`,
        );
      }
    }
  }

  /** Fetch until all bytes of the file are in pieces. */
  private async fetchWhole(file: BundleFile): Promise<void> {
    const { tries = TRIES, waitMs = WAIT_MS } = this.options;
    for (let failures = 0; ; ) {
      const offset = (await this.stored(file)).reduce((sum, piece) => sum + piece.bytes, 0);
      this.done.set(file.path, offset);
      if (offset === file.bytes) return;
      try {
        await this.fetchFrom(file, offset);
        failures = 0;
      } catch (error) {
        if (!(error instanceof Broken)) throw error;
        const after = (await this.stored(file)).reduce((sum, piece) => sum + piece.bytes, 0);
        failures = after > offset ? 1 : failures + 1;
        if (failures >= tries) {
          throw new DownloadFailure("network", `The connection broke and did not come back (${error.message}).`);
        }
        await this.pause(waitMs * 2 ** (failures - 1));
      }
    }
  }

  private async fetchFrom(file: BundleFile, offset: number): Promise<void> {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    this.abort.signal.addEventListener("abort", stop, { once: true });
    let stall: ReturnType<typeof setTimeout> | undefined;
    const alive = () => {
      clearTimeout(stall);
      stall = setTimeout(stop, this.options.stallMs ?? STALL_MS);
    };
    try {
      alive();
      const response = await this.request(file, offset, attempt.signal);
      await this.store(file, offset, response, alive);
    } catch (error) {
      if (this.abort.signal.aborted) throw new DownloadFailure("stopped", "The download was stopped.");
      if (error instanceof TypeError || isAbort(error)) {
        throw new Broken(isAbort(error) ? "the server went silent" : "no answer from the server");
      }
      throw error;
    } finally {
      clearTimeout(stall);
      this.abort.signal.removeEventListener("abort", stop);
    }
  }

  private async request(file: BundleFile, offset: number, signal: AbortSignal): Promise<Response> {
    const response = await this.options.fetch(new URL(encodeURI(file.path), this.model.base), {
      headers: offset > 0 ? { Range: `bytes=${offset}-` } : {},
      // The browser's HTTP cache would keep a second copy.
      cache: "no-store",
      signal,
    });
    if (response.status >= 500 || response.status === 429) throw new Broken(`the server answers ${response.status}`);
    if (!response.ok) {
      throw new DownloadFailure(
        "missing",
        `${file.path} cannot be fetched: the server answers ${response.status}. The site may be incomplete.`,
      );
    }
    const range = /^bytes (\d+)-\d+\/(\d+|\*)$/.exec(response.headers.get("content-range") ?? "");
    const size = range ? Number(range[2]) : NaN;
    if (response.status === 206 && (Number(range?.[1]) !== offset || (size === size && size !== file.bytes))) {
      throw new DownloadFailure("changed", `${file.path} has changed on the server since the page was opened. Reload it.`);
    }
    return response;
  }

  /** Store the body piece by piece; after a break, the part that arrived. */
  private async store(file: BundleFile, offset: number, response: Response, alive: () => void): Promise<void> {
    // A server without ranges starts over: skip the bytes that are stored already.
    let skip = response.status === 206 ? 0 : offset;
    let parts: Uint8Array<ArrayBuffer>[] = [];
    let held = 0;
    const flush = async (): Promise<void> => {
      if (held === 0) return;
      const body = new Blob(parts);
      await this.pieces.put(this.pieceKey(file, offset), new Response(body, { headers: { "content-length": `${held}` } }));
      offset += held;
      parts = [];
      held = 0;
    };
    const reader = response.body!.getReader();
    try {
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        alive();
        this.retryingIn = null;
        const fresh = part.value.subarray(Math.min(skip, part.value.length)) as Uint8Array<ArrayBuffer>;
        skip -= part.value.length - fresh.length;
        if (offset + held + fresh.length > file.bytes) {
          throw new DownloadFailure(
            "changed",
            `${file.path} is longer on the server than the ${bytes(file.bytes)} of the manifest. Reload the page.`,
          );
        }
        parts.push(fresh);
        held += fresh.length;
        this.done.set(file.path, offset + held);
        this.report();
        if (held >= (this.options.pieceBytes ?? PIECE_BYTES)) await flush();
      }
    } finally {
      await flush();
      void reader.cancel().catch(() => undefined);
    }
    if (offset < file.bytes) throw new Broken("the connection ended early");
  }

  /** Join the pieces, hash them, and hand them to the engine's cache if they are right -> the digest. */
  private async assemble(file: BundleFile): Promise<string> {
    const stored = await this.stored(file);
    const blobs = await Promise.all(stored.map(async (piece) => (await this.pieces.match(piece.key))!.blob()));
    const whole = new Blob(blobs);
    const digest = await digestOf(whole);
    if (digest !== file.sha256) return digest;
    await this.model.put(file, whole);
    for (const piece of stored) await this.pieces.delete(piece.key);
    this.done.set(file.path, file.bytes);
    this.report();
    return digest;
  }

  private async forget(file: BundleFile): Promise<void> {
    for (const piece of await this.stored(file)) await this.pieces.delete(piece.key);
    this.done.set(file.path, 0);
    this.report();
  }

  /** The pieces that follow each other without a gap. */
  private async stored(file: BundleFile): Promise<{ key: string; bytes: number }[]> {
    const stored: { key: string; bytes: number }[] = [];
    for (let offset = 0; offset < file.bytes; ) {
      const key = this.pieceKey(file, offset);
      const piece = await this.pieces.match(key);
      const size = Number(piece?.headers.get("content-length") ?? 0);
      if (!(size > 0) || offset + size > file.bytes) break;
      stored.push({ key, bytes: size });
      offset += size;
    }
    return stored;
  }

  /** By content, so that a new version of the page finds it; and by path, since two files may have the same content. */
  private pieceKey(file: BundleFile, offset: number): string {
    return new URL(`pieces/${file.sha256}/${encodeURI(file.path)}/${offset}`, this.model.base).href;
  }

  private async pause(ms: number): Promise<void> {
    this.retryingIn = ms / 1000;
    this.report();
    await new Promise<void>((resolve, reject) => {
      const timer = setTimeout(resolve, ms);
      const stopped = () => {
        clearTimeout(timer);
        reject(new DownloadFailure("stopped", "The download was stopped."));
      };
      this.abort.signal.addEventListener("abort", stopped, { once: true });
    });
  }

  private report(): void {
    let done = 0;
    for (const n of this.done.values()) done += n;
    this.options.onProgress({ done, total: this.model.manifest.totalBytes, retryingIn: this.retryingIn });
  }
}

function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

function asFailure(error: unknown, signal: AbortSignal): Error {
  if (signal.aborted) return new DownloadFailure("stopped", "The download was stopped.");
  if (error instanceof DOMException && error.name === "QuotaExceededError") {
    return new DownloadFailure(
      "quota",
      "The browser's storage for this site is full. Free some space on the disk, or delete other sites' data, and resume.",
    );
  }
  return error instanceof Error ? error : new Error(String(error));
}
