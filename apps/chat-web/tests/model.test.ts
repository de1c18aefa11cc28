import { createHash } from "node:crypto";
import { describe, expect, it } from "vitest";
import { choose } from "../src/app/model";
import { read } from "../src/app/settings";
import { digestOf } from "../src/model/cache";
import { checkFit, checkStorage, estimateMemory, suggestContext, type Adapter } from "../src/model/fit";
import { bytes, duration, milliseconds } from "../src/model/format";
import { ManifestError, parseManifest, parseSite } from "../src/model/manifest";
import { Rate } from "../src/model/rate";
import { CONTENT, LIBRARY, manifestJson, states } from "./bundle";

const ADAPTER: Adapter = {
  name: "GPU",
  fallback: false,
  features: ["shader-f16"],
  subgroupSize: null,
  maxBufferSize: 2 ** 31,
  maxStorageBufferBindingSize: 2 ** 30,
  maxStorageBuffersPerShaderStage: 10,
  maxComputeWorkgroupStorageSize: 32768,
  maxComputeInvocationsPerWorkgroup: 256,
};
const GIB = 2 ** 30;

it("a digest agrees with Node's, in hexadecimal", async () => {
  for (const length of [0, 64, 100_003]) {
    const data = Uint8Array.from({ length }, (_, i) => (i * 31 + (i >> 8)) & 255);
    expect(await digestOf(new Blob([data]))).toBe(createHash("sha256").update(data).digest("hex"));
  }
});

describe("the manifest", () => {
  it("is read into what the page needs", () => {
    const manifest = parseManifest(manifestJson(), LIBRARY);
    expect(manifest).toMatchObject({ contextLength: 4096, workspaceBytes: 9000, largestTensorBytes: 3072 * 32 * 4 });
    expect(manifest.library.path).toBe("lib/model.wasm");
    expect(manifest.files.map(({ path }) => path)).not.toContain("config.json");
    expect(manifest.totalBytes).toBe(70_000 + 300 + 4000 + 900 + 200_000 + 150_000);
  });

  it("of several libraries is read for one", () => {
    const json = manifestJson({ ...CONTENT, "lib/model-f16.wasm": CONTENT["lib/model.wasm"]!.subarray(0, 50_000) }) as any;
    const plan = { weights_bytes: 350_000, workspace_bytes: { prefill: 5000 } };
    json.target.variants.unshift({ name: "webgpu-f16", features: ["shader-f16"], library: { path: "lib/model-f16.wasm", memory_plan: plan, states: states(4) } });
    const [half, plain] = ["lib/model-f16.wasm", LIBRARY].map((library) => parseManifest(json, library));
    expect(half).toMatchObject({ kvCache: "tvm", states: [{ unitBytes: 512 * 16 }], workspaceBytes: 5000 });
    expect(plain).toMatchObject({ kvCache: "tvm", states: [{ unitBytes: 1024 * 16 }], workspaceBytes: 9000 });
    expect(plain!.totalBytes - half!.totalBytes).toBe(20_000);
    expect(half!.files.map(({ path }) => path)).not.toContain(LIBRARY);
  });

  it("says which engine runs the library, and what that needs", () => {
    const json = (content = CONTENT) => {
      const made = manifestJson(content) as { model: Record<string, unknown> };
      made.model.kv_cache = "pages";
      return made;
    };
    expect(() => parseManifest(json(), LIBRARY)).toThrow("no tokenizer_config.json");
    const manifest = parseManifest(json({ ...CONTENT, "tokenizer_config.json": CONTENT["tokenizer.json"]! }), LIBRARY);
    expect(manifest.kvCache).toBe("pages");
    expect(manifest.files.map(({ path }) => path)).toContain("tokenizer_config.json");
  });

  const broken: [string, (m: Record<string, any>) => void, RegExp][] = [
    ["another format", (m) => (m.format_version = 3), /format 3; this page reads 4/],
    ["a path out of the bundle", (m) => (m.files["../x.bin"] = m.files["tokenizer.json"]), /unsafe path/],
    ["an address as a path", (m) => (m.files["https://evil.example/x.bin"] = m.files["tokenizer.json"]), /unsafe path/],
    ["no library", (m) => delete m.files["lib/model.wasm"], /no lib\/model\.wasm/],
    ["no tokenizer", (m) => delete m.files["tokenizer.json"], /no tokenizer\.json/],
    ["a hash that is none", (m) => (m.files["tokenizer.json"].sha256 = "00"), /no SHA-256/],
    ["a size that is none", (m) => (m.files["tokenizer.json"].bytes = -1), /not a count/],
    ["a cache of another kind", (m) => (m.model.kv_cache = "rings"), /kv_cache rings; this page runs pages and tvm/],
    ["no memory plan", (m) => delete m.memory_plan, /memory_plan is not an object/],
    ["no states", (m) => delete m.states, /states is not a list/],
  ];
  it.each(broken)("with %s is refused", (_, change, message) => {
    const json = manifestJson();
    change(json);
    expect(() => parseManifest(json, LIBRARY)).toThrow(ManifestError);
    expect(() => parseManifest(json, LIBRARY)).toThrow(message);
  });

  it.each([null, [], "x", { format: 2 }, { format: 1, title: "t", choices: [] }, { format: 1, title: "t", choices: [{ path: "../", library: "l", features: [] }] }])(
    "site.json %j is refused",
    (value) => expect(() => parseSite(value)).toThrow(ManifestError),
  );

  it("of a site may ask for a size of subgroups, of those that there are", () => {
    const site = (subgroup_size?: unknown): unknown => ({ format: 1, title: "t", choices: [{ path: "m/", library: "l", features: [], subgroup_size }] });
    expect([site(), site(null), site(32)].map((s) => parseSite(s).choices[0]!.subgroupSize)).toEqual([null, null, 32]);
    for (const value of [0, 1, 12, 256, -32, 32.5, "32", [32], {}, true]) expect(() => parseSite(site(value))).toThrow(/subgroup_size/);
  });
});

describe("fit", () => {
  const manifest = parseManifest(manifestJson(), LIBRARY);
  it("counts weights, cache and workspace", () => {
    expect(estimateMemory(manifest, 1000)).toEqual({ weights: 350_000, cache: 1_024_000, workspace: 9000, total: 1_383_000 });
  });

  it("refuses what the engine would fail on, and only that", () => {
    const estimate = estimateMemory(manifest, 4096);
    expect(checkFit(manifest, ADAPTER, estimate, 8 * GIB)).toBeNull();
    const cases: [Partial<Adapter>, RegExp][] = [
      [{ maxStorageBuffersPerShaderStage: 8 }, /10 storage buffers/],
      [{ maxComputeWorkgroupStorageSize: 16384 }, /32 kB of workgroup memory/],
      [{ maxBufferSize: 2 ** 20 }, /needs 128 MB or more/],
    ];
    for (const [part, text] of cases) {
      expect(checkFit(manifest, { ...ADAPTER, ...part }, estimate, null)).toMatchObject({ overridable: false, text: expect.stringMatching(text) });
    }
    // 512 MiB in one piece: an adapter between WebLLM's two steps gives 128 MiB.
    const large = { ...manifest, largestTensorBytes: 2 ** 29 };
    expect(checkFit(large, ADAPTER, estimate, null)).toBeNull();
    expect(checkFit(large, { ...ADAPTER, maxStorageBufferBindingSize: 2 ** 30 - 1 }, estimate, null)?.text).toMatch(/537 MB in one piece.*134 MB at once/);
  });

  it("weighs the device's memory, where the browser tells", () => {
    const heavy = { ...manifest, weightsBytes: 3 * GIB };
    const estimate = estimateMemory(heavy, 1024);
    expect(checkFit(heavy, ADAPTER, estimate, null)).toBeNull();
    expect(checkFit(heavy, ADAPTER, estimate, 8 * GIB)).toBeNull();
    expect(checkFit(heavy, ADAPTER, estimate, 4 * GIB)).toMatchObject({ overridable: true });
    const long = { ...manifest, contextLength: 131_072, states: [{ ...manifest.states[0]!, unitBytes: 16 * 65_536 }] };
    expect(suggestContext(long, null)).toBe(131_072);
    expect(suggestContext(long, 4 * GIB)).toBe(32_768);
  });

  it("weighs the browser's storage", () => {
    expect(checkStorage(100, { usage: 50, quota: 150 })).toBeNull();
    expect(checkStorage(101, { usage: 50, quota: 150 })?.text).toMatch(/need 101 B more.*store 100 B more/);
    expect(checkStorage(101, {})).toBeNull();
  });

  it("chooses the first version that the GPU can run", () => {
    const choices = [
      { path: "m/", library: "lanes", features: ["shader-f16", "subgroups"], subgroupSize: 32 },
      { path: "m/", library: "half", features: ["shader-f16"], subgroupSize: null },
      { path: "m/", library: "plain", features: [], subgroupSize: null },
    ];
    const lanes = { ...ADAPTER, features: ["shader-f16", "subgroups"] };
    expect(choose(choices, { ...lanes, subgroupSize: 32 })?.library).toBe("lanes");
    for (const subgroupSize of [16, 64, null]) expect(choose(choices, { ...lanes, subgroupSize })?.library).toBe("half");
    expect(choose(choices, { ...ADAPTER, subgroupSize: 32 })?.library).toBe("half");
    expect(choose(choices, ADAPTER)?.library).toBe("half");
    expect(choose(choices, { ...ADAPTER, features: [] })?.library).toBe("plain");
    expect(choose(choices.slice(0, 2), { ...ADAPTER, features: [] })).toBeNull();
  });
});

describe("figures", () => {
  it("are for people", () => {
    expect([0, 999, 1000, 999_499, 999_500, 4_400_000, 123_456_789, 5e12].map(bytes)).toEqual(
      ["0 B", "999 B", "1.0 kB", "999 kB", "1.0 MB", "4.4 MB", "123 MB", "5.0 TB"]); // prettier-ignore
    expect([0.2, 1, 59.1, 61, 3600, Infinity].map(duration)).toEqual(["less than a second", "1 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "unknown"]);
    expect([3.2, 999.4, 1234, 12_345].map(milliseconds)).toEqual(["3 ms", "999 ms", "1.23 s", "12.3 s"]);
  });

  it("of speed come from the last moments", () => {
    const rate = new Rate();
    rate.add(0, 0);
    expect(rate.perSecond()).toBeNull();
    for (let t = 1000; t <= 10_000; t += 1000) rate.add(t, t);
    expect(rate.perSecond()).toBe(1000);
    expect(rate.left(20_000)).toBe(10);
    for (let t = 11_000; t <= 20_000; t += 1000) rate.add(t, 10_000);
    expect(rate.perSecond()).toBe(0);
    expect(rate.left(20_000)).toBeNull();
    rate.add(21_000, 5000); // a refused file starts over
    expect(rate.perSecond()).toBeNull();
  });
});

describe("settings", () => {
  it("survive any text in their place", () => {
    const defaults = read(null);
    for (const text of ["", "{", "[]", "null", '{"sampling": 5, "theme": "pink", "contextTokens": -1}']) expect(read(text)).toEqual(defaults);
    expect(read('{"sampling": {"temperature": 99, "topP": 0.5, "seed": 7}}').sampling).toMatchObject({ temperature: 0.7, topP: 0.5, seed: 7 });
  });
});
