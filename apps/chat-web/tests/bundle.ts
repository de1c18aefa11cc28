/** A small bundle, and a server for it that can fail. */

import { createHash } from "node:crypto";

export const BASE = "https://site.example/page/models/m/resolve/main/";

export const CONTENT: Record<string, Uint8Array> = {
  "lib/model.wasm": noise(70_000, 1),
  "mlc-chat-config.json": noise(300, 2),
  "tokenizer.json": noise(4000, 3),
  "tensor-cache.json": noise(900, 4),
  "params_shard_0.bin": noise(200_000, 5),
  "params_shard_1.bin": noise(150_000, 6),
};

/** Bytes that repeat nowhere near (a linear congruential generator, Numerical Recipes' constants). */
function noise(length: number, seed: number): Uint8Array {
  const bytes = new Uint8Array(length);
  for (let i = 0, x = seed; i < length; i++) bytes[i] = (x = (Math.imul(x, 1664525) + 1013904223) >>> 0) >>> 24;
  return bytes;
}

export const sha256 = (bytes: Uint8Array): string => createHash("sha256").update(bytes).digest("hex");

/** Of one layer: 64 bytes of keys and of values of each token for each of `dim`. */
export const states = (dim: number): object[] => [
  {
    name: "layers.0.attention",
    kind: "pages",
    copies: 8,
    parts: [
      { name: "keys", dtype: "float32", shape: [dim * 2, 16] },
      { name: "values", dtype: "float32", shape: [16, dim * 2] },
    ],
  },
];

export function manifestJson(content = CONTENT): Record<string, unknown> {
  const files = Object.entries(content).map(([path, bytes]) => [path, { sha256: sha256(bytes), bytes: bytes.length }]);
  return {
    format_version: 4,
    quantization: "q4f16_1",
    target: { name: "webgpu", variants: [{ name: "webgpu", features: [], library: null }] },
    model: { model_type: "llama", context_length: 4096, vocab_size: 3072, prefill_chunk: 512 },
    memory_plan: { weights_bytes: 350_000, workspace_bytes: { prefill: 9000, decode: 100 } },
    states: states(8),
    params: [
      { name: "a", shape: [3072, 32], dtype: "uint32" },
      { name: "b", shape: [3072, 8], dtype: "float16" },
    ],
    files: { ...Object.fromEntries(files), "config.json": { sha256: "0".repeat(64), bytes: 10 } },
  };
}

export const LIBRARY = "lib/model.wasm";

export interface Seen {
  path: string;
  range: string | null;
}

type Respond = (path: string, first: number, seen: Seen[]) => Response | null;

/** `fetch` over `content`; `respond` may answer first. Bodies come in chunks of 16 kB. */
export function server(content = CONTENT, respond: Respond = () => null): { fetch: typeof fetch; seen: Seen[] } {
  const seen: Seen[] = [];
  const answer = async (url: RequestInfo | URL, init?: RequestInit): Promise<Response> => {
    const path = String(url).slice(BASE.length);
    const range = new Headers(init?.headers).get("range");
    const first = Number(/bytes=(\d+)-/.exec(range ?? "")?.[1] ?? 0);
    seen.push({ path, range });
    const own = respond(path, first, seen);
    if (own) return own;
    const bytes = content[path];
    if (!bytes) return new Response("", { status: 404 });
    return partial(bytes, first, bytes.length);
  };
  return { fetch: answer as typeof fetch, seen };
}

/** A 206 (200 from the start) whose body breaks off at `until`. */
export function partial(bytes: Uint8Array, first: number, until: number): Response {
  let at = first;
  const body = new ReadableStream<Uint8Array>({
    pull(controller) {
      if (at >= until) {
        if (until < bytes.length) controller.error(new TypeError("network error"));
        else controller.close();
        return;
      }
      const end = Math.min(at + 16_384, until);
      controller.enqueue(bytes.slice(at, end));
      at = end;
    },
  }, { highWaterMark: 0 });
  const headers: Record<string, string> = { "content-length": String(bytes.length - first) };
  if (first > 0) headers["content-range"] = `bytes ${first}-${bytes.length - 1}/${bytes.length}`;
  return new Response(body, { status: first > 0 ? 206 : 200, headers });
}
