import { beforeEach, describe, expect, it } from "vitest";
import { ModelCache, revision } from "../src/model/cache";
import { download, DownloadFailure, type DownloadProgress } from "../src/model/download";
import { parseManifest } from "../src/model/manifest";
import { BASE, CONTENT, LIBRARY, manifestJson, partial, server } from "./bundle";
import { MemoryCaches } from "./memory_caches";

const SHARD = "params_shard_0.bin";
const manifest = parseManifest(manifestJson(), LIBRARY);
const FAST = { pieceBytes: 32_768, waitMs: 1, tries: 3 };

let storage: MemoryCaches;
let model: ModelCache;
let progress: DownloadProgress[];

beforeEach(() => {
  storage = new MemoryCaches();
  model = new ModelCache(storage.asStorage(), BASE, manifest);
  progress = [];
});

function run(from: { fetch: typeof fetch }, signal = new AbortController().signal): Promise<void> {
  return download(model, { ...FAST, fetch: from.fetch, storage: storage.asStorage(), signal, onProgress: (p) => progress.push(p) });
}

async function failure(from: { fetch: typeof fetch }, signal?: AbortSignal): Promise<DownloadFailure> {
  const error = await run(from, signal).then(() => null, (e: unknown) => e);
  expect(error).toBeInstanceOf(DownloadFailure);
  return error as DownloadFailure;
}

describe("a download", () => {
  it("fills the engine's caches, under addresses with the bundle's revision", async () => {
    const from = server();
    await run(from);
    const key = (path: string) => `${BASE}resolve/${revision(manifest)}/${path}`;
    expect(storage.urls("webllm/config")).toEqual([key("mlc-chat-config.json")]);
    expect(storage.urls("webllm/wasm")).toEqual([key("lib/model.wasm")]);
    expect(storage.urls("webllm/model").sort()).toEqual(
      ["params_shard_0.bin", "params_shard_1.bin", "tensor-cache.json", "tokenizer.json"].map(key),
    );
    const shard = await (await storage.open("webllm/model")).match(key(SHARD));
    expect(new Uint8Array(await shard!.arrayBuffer())).toEqual(CONTENT[SHARD]);
    expect(storage.urls("mlcpipe/pieces")).toEqual([]);
    expect(await model.missing()).toEqual([]);
    expect(progress.at(-1)).toEqual({ done: manifest.totalBytes, total: manifest.totalBytes, retryingIn: null });
    expect(from.seen.filter(({ path }) => path === "config.json")).toEqual([]); // other hosts' files
  });

  it("resumes where the connection broke", async () => {
    let breaks = 2;
    const from = server(CONTENT, (path, first) => {
      if (path !== SHARD || breaks === 0) return null;
      breaks--;
      return partial(CONTENT[SHARD]!, first, first + 70_000);
    });
    await run(from);
    const ranges = from.seen.filter(({ path }) => path === SHARD).map(({ range }) => range);
    expect(ranges).toEqual([null, "bytes=70000-", "bytes=140000-"]);
    expect(progress.some(({ retryingIn }) => retryingIn !== null)).toBe(true);
  });

  it("resumes after a stop, in another session", async () => {
    const stop = new AbortController();
    const first = server(CONTENT, (path, at) => {
      if (path !== SHARD) return null;
      const body = partial(CONTENT[SHARD]!, at, 80_000);
      setTimeout(() => stop.abort(), 5);
      return body;
    });
    expect((await failure(first, stop.signal)).kind).toBe("stopped");
    const second = server();
    await run(second);
    const range = second.seen.find(({ path }) => path === SHARD)?.range ?? "";
    expect(Number(/bytes=(\d+)-/.exec(range)?.[1])).toBeGreaterThanOrEqual(65_536);
    expect(await model.missing()).toEqual([]);
  });

  it("passes over what it has where a server knows no ranges", async () => {
    let broken = false;
    const from = server(CONTENT, (path) => {
      if (path !== SHARD) return null;
      const until = broken ? CONTENT[SHARD]!.length : 90_000;
      broken = true;
      return partial(CONTENT[SHARD]!, 0, until);
    });
    await run(from);
    expect(await model.missing()).toEqual([]);
  });

  it("gives up with a message after tries without a byte, and keeps the rest", async () => {
    const error = await failure(server(CONTENT, (path) => (path === SHARD ? new Response("", { status: 503 }) : null)));
    expect(error.kind).toBe("network");
    expect(error.message).toContain("the server answers 503");
    expect((await model.missing()).map(({ path }) => path)).toContain(SHARD);
  });

  it("names a file that is not there", async () => {
    const error = await failure(server(CONTENT, (path) => (path === SHARD ? new Response("", { status: 404 }) : null)));
    expect([error.kind, error.message]).toEqual(["missing", expect.stringContaining(`${SHARD} cannot be fetched: the server answers 404`)]);
  });

  it("refuses a flipped byte, and stores nothing of it", async () => {
    const wrong = CONTENT[SHARD]!.slice();
    wrong[100_000]! ^= 1;
    const from = server({ ...CONTENT, [SHARD]: wrong });
    const error = await failure(from);
    expect([error.kind, error.message]).toEqual(["corrupt", expect.stringContaining(`${SHARD} is not the file that was published`)]);
    expect(from.seen.filter(({ path }) => path === SHARD).map(({ range }) => range)).toEqual([null, null]);
    expect(storage.urls("webllm/model").filter((url) => url.endsWith(SHARD))).toEqual([]);
    expect(storage.urls("mlcpipe/pieces").filter((url) => url.includes(SHARD))).toEqual([]);
  });

  it("refuses a file that is longer, or of another length by its range", async () => {
    const longer = new Uint8Array(CONTENT[SHARD]!.length + 1);
    expect((await failure(server({ ...CONTENT, [SHARD]: longer }))).kind).toBe("changed");
    let breaks = 1;
    const swapped = server(CONTENT, (path, first) => {
      if (path !== SHARD) return null;
      return breaks-- > 0 ? partial(CONTENT[SHARD]!, first, 70_000) : partial(longer, first, longer.length);
    });
    expect((await failure(swapped)).kind).toBe("changed");
  });

  it("says that the storage is full, and resumes when there is room", async () => {
    storage.room.bytes = 250_000;
    expect((await failure(server())).kind).toBe("quota");
    storage.room.bytes = Infinity;
    await run(server());
    expect(await model.missing()).toEqual([]);
  });

  it("reports nothing after its end", async () => {
    await failure(server(CONTENT, (path) => (path === "params_shard_1.bin" ? new Response("", { status: 404 }) : null)));
    const count = progress.length;
    await new Promise((resolve) => setTimeout(resolve, 30));
    expect(progress.length).toBe(count);
  });

  it("counts a silent server as a broken connection", async () => {
    const silent = ((_: unknown, init: RequestInit) =>
      new Promise((_resolve, reject) => {
        init.signal!.addEventListener("abort", () => reject(new DOMException("aborted", "AbortError")));
      })) as typeof fetch;
    const options = { ...FAST, stallMs: 5, fetch: silent, storage: storage.asStorage(), signal: new AbortController().signal };
    const error = await download(model, { ...options, onProgress: () => undefined }).catch((e: unknown) => e);
    expect((error as DownloadFailure).message).toContain("went silent");
  });

  it("takes over the files of an earlier bundle that did not change", async () => {
    await run(server());
    const changed = { ...CONTENT, "lib/model.wasm": new Uint8Array(500) };
    model = new ModelCache(storage.asStorage(), BASE, parseManifest(manifestJson(changed), LIBRARY));
    const from = server(changed);
    await run(from);
    expect(from.seen.map(({ path }) => path)).toEqual(["lib/model.wasm"]);
    expect(storage.urls("webllm/wasm").length).toBe(1);
    expect(storage.urls("webllm/model").every((url) => url.startsWith(model.keyBase))).toBe(true);
  });
});

describe("stored files", () => {
  it("are hashed again on demand; damaged ones go", async () => {
    await run(server());
    expect(await model.verify(() => undefined)).toEqual([]);
    const cache = storage.caches.get("webllm/model")!;
    const url = storage.urls("webllm/model").find((u) => u.endsWith(SHARD))!;
    cache.entries.get(url)!.body = new Blob([new Uint8Array(200_000)]);
    expect((await model.verify(() => undefined)).map(({ path }) => path)).toEqual([SHARD]);
    expect((await model.missing()).map(({ path }) => path)).toEqual([SHARD]);
  });

  it("go all when the model is removed, and nothing else", async () => {
    await run(server());
    const other = "https://site.example/other/models/m/resolve/main/resolve/0/tokenizer.json";
    await (await storage.open("webllm/model")).put(other, new Response("x"));
    await model.remove();
    expect([...storage.urls("webllm/model"), ...storage.urls("webllm/wasm"), ...storage.urls("webllm/config")]).toEqual([other]);
  });
});
