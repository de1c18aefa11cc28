/**
 * The files of a model in the browser.
 *
 * WebLLM keeps what it fetches in three caches under the file's URL (`createArtifactCache` of tvmjs). Files that our
 * downloader has verified are put there under URLs of their own, with the bundle's revision in them, so that the
 * engine finds them and never fetches: a new bundle at the same address cannot mix with the old one's files.
 */

import { sha256 } from "@noble/hashes/sha2.js";
import { bytesToHex } from "@noble/hashes/utils.js";
import type { BundleFile, Manifest } from "./manifest";

export const CONFIG_CACHE = "webllm/config";
export const MODEL_CACHE = "webllm/model";
export const WASM_CACHE = "webllm/wasm";
export const PIECES_CACHE = "mlcpipe/pieces";
const DIGEST_HEADER = "x-mlcpipe-sha256";
const ENGINE_CACHES = [CONFIG_CACHE, MODEL_CACHE, WASM_CACHE];

export class ModelCache {
  /** The engine's address for the model; nothing is served there. */
  readonly keyBase: string;
  private readonly root: string;

  constructor(
    private readonly storage: CacheStorage,
    readonly base: string,
    readonly manifest: Manifest,
  ) {
    this.root = new URL("resolve/", base).href;
    this.keyBase = new URL(`${revision(manifest)}/`, this.root).href;
  }

  /** Whether each file is there. The hash was checked when it was stored. */
  async missing(): Promise<BundleFile[]> {
    const states = await Promise.all(this.manifest.files.map(async (file) => ({ file, there: await this.has(file) })));
    return states.filter(({ there }) => !there).map(({ file }) => file);
  }

  async has(file: BundleFile): Promise<boolean> {
    return (await this.match(file)) !== undefined;
  }

  async blob(file: BundleFile): Promise<Blob> {
    const response = await this.match(file);
    if (!response) throw new Error(`${file.path} is no longer in the browser's storage`);
    return response.blob();
  }

  /** Store a verified file. */
  async put(file: BundleFile, content: Blob): Promise<void> {
    const cache = await this.storage.open(cacheOf(file));
    const headers = {
      "content-type": contentType(file.path),
      "content-length": String(file.bytes),
      [DIGEST_HEADER]: file.sha256,
    };
    await cache.put(this.key(file), new Response(content, { headers }));
  }

  /** Take over files of an earlier revision with equal content; `prune` removes the rest. */
  async adopt(file: BundleFile): Promise<boolean> {
    const cache = await this.storage.open(cacheOf(file));
    for (const request of await cache.keys()) {
      if (!request.url.startsWith(this.root)) continue;
      const response = await cache.match(request);
      if (response?.headers.get(DIGEST_HEADER) !== file.sha256) continue;
      await this.put(file, await response.blob());
      return true;
    }
    return false;
  }

  /** Remove files of other revisions of this model. */
  async prune(): Promise<void> {
    const digests = new Set(this.manifest.files.map((file) => file.sha256));
    await this.removeWhere(ENGINE_CACHES, (url) => url.startsWith(this.root) && !url.startsWith(this.keyBase));
    const pieces = new URL("pieces/", this.base).href;
    await this.removeWhere(
      [PIECES_CACHE],
      (url) => url.startsWith(pieces) && !digests.has(url.slice(pieces.length).split("/")[0]!),
    );
  }

  /** Remove all files of this model, half downloads too. */
  async remove(): Promise<void> {
    await this.removeWhere([...ENGINE_CACHES, PIECES_CACHE], (url) => url.startsWith(this.base));
  }

  /** Hash every stored file again; bad ones are removed and returned. */
  async verify(onBytes: (done: number) => void): Promise<BundleFile[]> {
    const bad: BundleFile[] = [];
    let done = 0;
    for (const file of this.manifest.files) {
      const response = await this.match(file);
      const content = await response?.blob();
      const digest = content && (await digestOf(content, (n) => onBytes((done += n))));
      if (digest === file.sha256) continue;
      bad.push(file);
      await (await this.storage.open(cacheOf(file))).delete(this.key(file));
    }
    return bad;
  }

  private async match(file: BundleFile): Promise<Response | undefined> {
    const response = await (await this.storage.open(cacheOf(file))).match(this.key(file));
    return response?.headers.get(DIGEST_HEADER) === file.sha256 ? response : undefined;
  }

  private key(file: BundleFile): string {
    return new URL(encodeURI(file.path), this.keyBase).href;
  }

  private async removeWhere(names: string[], condition: (url: string) => boolean): Promise<void> {
    for (const name of names) {
      if (!(await this.storage.has(name))) continue;
      const cache = await this.storage.open(name);
      for (const request of await cache.keys()) if (condition(request.url)) await cache.delete(request);
    }
  }
}

/** SHA-256 by parts: `crypto.subtle` takes only a whole file at once, and shards can be large. */
export async function digestOf(content: Blob, onBytes: (n: number) => void = () => undefined): Promise<string> {
  const hash = sha256.create();
  const reader = content.stream().getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    hash.update(part.value);
    onBytes(part.value.length);
  }
  return bytesToHex(hash.digest());
}

/** A name for the content of all files. */
export function revision(manifest: Manifest): string {
  const lines = manifest.files.map((file) => `${file.path} ${file.sha256}\n`).sort();
  return bytesToHex(sha256(new TextEncoder().encode(lines.join("")))).slice(0, 16);
}

function cacheOf(file: BundleFile): string {
  if (file.path === "mlc-chat-config.json") return CONFIG_CACHE;
  return file.path.endsWith(".wasm") ? WASM_CACHE : MODEL_CACHE;
}

function contentType(path: string): string {
  if (path.endsWith(".json")) return "application/json";
  return path.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
}
