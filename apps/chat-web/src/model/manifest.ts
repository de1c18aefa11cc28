/** `mlcpipe.json` and `site.json`, which the page reads before any download. Both are checked, not trusted. */

import { stateOf, tensorBytes, type State } from "./states";

export interface BundleFile {
  path: string;
  bytes: number;
  sha256: string;
}

export interface Manifest {
  modelType: string;
  quantization: string;
  /** Tokens. */
  contextLength: number;
  vocabSize: number;
  prefillChunk: number;
  weightsBytes: number;
  /** Who owns the states: the page's own engine (pages), or TVM's cache, which WebLLM has (tvm). */
  kvCache: "pages" | "tvm";
  states: State[];
  /** Of the largest function: the functions run one after the other. */
  workspaceBytes: number;
  /** Of the largest tensor, which must fit in one GPU buffer. */
  largestTensorBytes: number;
  library: BundleFile;
  /** Every file that the engine reads: this library, the configuration, the tokenizer, the weights. */
  files: BundleFile[];
  totalBytes: number;
}

export interface Choice {
  /** Folder of the bundle, relative to the page. */
  path: string;
  /** The bundle's library with kernels for these features; a bundle may have several for the same weights. */
  library: string;
  /** WebGPU features that its kernels use. */
  features: string[];
  /** Invocations that every subgroup must have, a power of two; null if any will do. */
  subgroupSize: number | null;
}

export interface Site {
  title: string;
  /** Start the download without a question: the files come from this computer. */
  autostart: boolean;
  /** The same model for several kinds of GPU, best first. */
  choices: Choice[];
}

/** Something in a file of the site that the page cannot use. The message is for people. */
export class ManifestError extends Error {
  override name = "ManifestError";
}

const NEEDED = ["mlc-chat-config.json", "tokenizer.json", "tensor-cache.json"];
/** That the page's own engine reads, too. */
const NEEDED_FOR_PAGES = ["tokenizer_config.json"];

export function parseSite(value: unknown): Site {
  const site = object(value, "site.json");
  if (site.format !== 1) throw new ManifestError(`site.json has format ${String(site.format)}; this page reads 1`);
  const choices = array(site.choices, "site.json: choices").map((item, index) => {
    const choice = object(item, `site.json: choices[${index}]`);
    const path = text(choice.path, "path");
    if (!safePath(path.replace(/\/$/, ""))) throw new ManifestError(`site.json names an unsafe path: ${path}`);
    const library = text(choice.library, "library");
    const features = array(choice.features, "features").map((f) => text(f, "feature"));
    return { path, library, features, subgroupSize: subgroupSize(choice.subgroup_size) };
  });
  if (choices.length === 0) throw new ManifestError("site.json names no model");
  return { title: text(site.title, "title"), autostart: site.autostart === true, choices };
}

/** One of the sizes that WGSL knows. */
function subgroupSize(value: unknown): number | null {
  if (value == null) return null;
  if (![4, 8, 16, 32, 64, 128].includes(value as number)) throw new ManifestError("subgroup_size is not a size");
  return value as number;
}

/** One of the bundle's libraries in the manifest, and its requirements. */
export function parseManifest(value: unknown, library: string): Manifest {
  const manifest = object(value, "mlcpipe.json");
  if (manifest.format_version !== 4) {
    throw new ManifestError(`mlcpipe.json has format ${String(manifest.format_version)}; this page reads 4`);
  }
  const model = object(manifest.model, "model");
  const own = ownLibrary(manifest, library) ?? manifest;
  const plan = object(own.memory_plan, "memory_plan");
  const all = parseFiles(manifest.files);
  const kvCache = model.kv_cache ?? "tvm";
  if (kvCache !== "pages" && kvCache !== "tvm") {
    throw new ManifestError(`mlcpipe.json has kv_cache ${String(kvCache)}; this page runs pages and tvm`);
  }
  const needed = [library, ...NEEDED, ...(kvCache === "pages" ? NEEDED_FOR_PAGES : [])];
  const files = all.filter(({ path }) => needed.includes(path) || path.endsWith(".bin"));
  for (const name of needed) {
    if (!files.some((file) => file.path === name)) throw new ManifestError(`the bundle has no ${name}`);
  }
  const workspaces = Object.values(object(plan.workspace_bytes, "workspace_bytes")).map((n) => count(n, "workspace"));
  return {
    modelType: text(model.model_type, "model_type"),
    quantization: text(manifest.quantization, "quantization"),
    contextLength: count(model.context_length, "context_length"),
    vocabSize: count(model.vocab_size, "vocab_size"),
    prefillChunk: count(model.prefill_chunk, "prefill_chunk"),
    weightsBytes: count(plan.weights_bytes, "weights_bytes"),
    kvCache,
    states: array(own.states, "states").map(parseState),
    workspaceBytes: Math.max(0, ...workspaces),
    largestTensorBytes: largestTensor(array(manifest.params, "params")),
    library: files.find((file) => file.path === library)!,
    files,
    totalBytes: files.reduce((sum, file) => sum + file.bytes, 0),
  };
}

/** What is said of a library that is one of several; the manifest speaks of the one that every GPU runs. */
function ownLibrary(manifest: Record<string, unknown>, library: string): Record<string, unknown> | undefined {
  for (const item of array(object(manifest.target, "target").variants, "variants")) {
    const own = object(item, "variant").library;
    if (own != null && object(own, "library").path === library) return object(own, "library");
  }
  return undefined;
}

function parseFiles(value: unknown): BundleFile[] {
  return Object.entries(object(value, "files")).map(([path, info]) => {
    const { bytes, sha256 } = object(info, path);
    if (!safePath(path)) throw new ManifestError(`mlcpipe.json names an unsafe path: ${path}`);
    const digest = text(sha256, "sha256");
    if (!/^[0-9a-f]{64}$/.test(digest)) throw new ManifestError(`${path} has no SHA-256 in mlcpipe.json`);
    return { path, bytes: count(bytes, `${path}: bytes`), sha256: digest };
  });
}

function parseState(item: unknown): State {
  const state = object(item, "state");
  const parts = array(state.parts, "parts").map(parseTensor);
  return stateOf({
    kind: text(state.kind, "kind"),
    window: count(state.window ?? 0, "window"),
    dtype: text(state.dtype ?? "int8", "dtype"),
    copies: count(state.copies ?? 1, "copies"),
    parts,
  });
}

function largestTensor(params: unknown[]): number {
  return Math.max(0, ...params.map((item) => tensorBytes(parseTensor(item))));
}

function parseTensor(item: unknown): { dtype: string; shape: number[] } {
  const tensor = object(item, "tensor");
  return { dtype: text(tensor.dtype, "dtype"), shape: array(tensor.shape, "shape").map((n) => count(n, "dimension")) };
}

/** No way out of the bundle's folder, and no second meaning in a URL. */
function safePath(path: string): boolean {
  const parts = path.split("/");
  return path.length <= 500 && /^[\w.\-/ +@]+$/.test(path) && !parts.some((p) => p === "" || p === "." || p === "..");
}

function object(value: unknown, what: string): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new ManifestError(`${what} is not an object`);
  }
  return value as Record<string, unknown>;
}

function array(value: unknown, what: string): unknown[] {
  if (!Array.isArray(value)) throw new ManifestError(`${what} is not a list`);
  return value;
}

function text(value: unknown, what: string): string {
  if (typeof value !== "string" || value === "") throw new ManifestError(`${what} is not a text`);
  return value;
}

function count(value: unknown, what: string): number {
  if (typeof value !== "number" || !Number.isSafeInteger(value) || value < 0) {
    throw new ManifestError(`${what} is not a count`);
  }
  return value;
}
