// Runs compiled libraries in Node, with tvmjs on Dawn: reads a job as JSON from stdin, writes its result as JSON.
//
// {"wasm": path, "calls": [{"name", "args": [tensor or number], "outputs": [index]}]}
//   calls functions of a library without a model; the result holds the outputs.
// {"bundle": path, "context", "chunk", "generate": [{"tokens": [...], "count": n}], "logits": bool}
//   greedy generation, each from an empty cache; the result holds tokens and, if asked, the logits of every step.
// {"bundle": path, "engine": path, "context", "turns": [{"tokens": [...], "said", "sampling"}]}
//   turns of a chat in the page's own engine; the result holds answers and how much was reused.
// {"probe": true}
//   the adapter's features, and the least and the largest size of its subgroups.
// A tensor is {"shape", "dtype", "data": base64 of its bytes}.
"use strict";
console.log = console.error; // tvmjs writes to stdout, which is for the result
const fs = require("fs");
const path = require("path");

function gpu() {
  const { create, globals } = require("webgpu");
  Object.assign(globalThis, globals);
  // Vulkan initializes no memory of workgroups, so kernels do not expect it; SwiftShader takes seconds to compile it.
  return create(["backend=vulkan", "enable-dawn-features=disable_workgroup_init"]);
}

async function probe() {
  const adapter = await gpu().requestAdapter();
  if (!adapter) return { features: [], subgroups: [], errors: [] };
  const { subgroupMinSize, subgroupMaxSize } = adapter.info;
  return { features: [...adapter.features], subgroups: [subgroupMinSize, subgroupMaxSize], errors: [] };
}

function offerGpu() {
  Object.defineProperty(globalThis, "navigator", { value: { gpu: gpu() }, configurable: true });
}

async function open(wasm) {
  offerGpu();
  const tvmjs = require("@mlc-ai/web-runtime");
  const bytes = new Uint8Array(fs.readFileSync(wasm));
  const tvm = await tvmjs.instantiate(bytes.buffer, tvmjs.createPolyfillWASI(), () => {});
  const found = await tvmjs.detectGPUDevice();
  if (found === undefined) throw new Error("no adapter");
  const errors = [];
  found.device.onuncapturederror = (event) => errors.push(event.error.message);
  const sizes = { largestBuffer: 0 };
  const createBuffer = found.device.createBuffer.bind(found.device);
  found.device.createBuffer = (wanted) => {
    if (wanted.usage & GPUBufferUsage.STORAGE) sizes.largestBuffer = Math.max(sizes.largestBuffer, wanted.size);
    return createBuffer(wanted);
  };
  tvm.initWebGPU(found.device);
  tvm.beginScope();
  const device = tvm.webgpu();
  const info = found.adapterInfo;
  const adapter = { vendor: info.vendor, architecture: info.architecture, f16: found.device.features.has("shader-f16") };
  return { tvm, device, errors, adapter, sizes };
}

function put({ tvm, device }, { shape, dtype, data }) {
  const tensor = tvm.empty(shape, dtype, device);
  tensor.copyFromRawBytes(new Uint8Array(Buffer.from(data, "base64")));
  return tensor;
}

async function get({ tvm, device }, tensor) {
  const host = tvm.empty(tensor.shape, tensor.dtype, tvm.cpu());
  host.copyFrom(tensor);
  await device.sync();
  return { shape: tensor.shape, dtype: tensor.dtype, data: Buffer.from(host.toRawBytes()).toString("base64") };
}

function loadParams({ tvm, device }, vm, bundle) {
  const { params } = JSON.parse(vm.getFunction("_metadata")().toString());
  const cache = JSON.parse(fs.readFileSync(path.join(bundle, "tensor-cache.json"), "utf8"));
  const found = {};
  for (const shard of cache.records) {
    const bytes = fs.readFileSync(path.join(bundle, shard.dataPath));
    for (const { name, shape, dtype, byteOffset, nbytes } of shard.records) {
      found[name] = tvm.empty(shape, dtype, device);
      found[name].copyFromRawBytes(new Uint8Array(bytes.subarray(byteOffset, byteOffset + nbytes)));
    }
  }
  return tvm.getGlobalFunc("ffi.Array")(...params.map(({ name }) => found[name]));
}

async function generate(state, job) {
  const { tvm, device } = state;
  const vm = tvm.createVirtualMachine(device);
  let began = performance.now();
  await tvm.asyncLoadWebGPUPipelines(vm.getInternalModule());
  const times = { pipelines: performance.now() - began };
  const params = loadParams(state, vm, job.bundle);
  const one = (n) => tvm.makeShapeTuple([n]);
  const kv = vm.getFunction("create_tir_paged_kv_cache")(...[1, job.context, job.chunk, 16, 0].map(one));
  const [embed, prefill, decode] = ["embed", "prefill", "decode"].map((name) => vm.getFunction(name));
  const [begin, end, add, clear] = ["begin_forward", "end_forward", "add_sequence", "clear"].map((name) =>
    tvm.getGlobalFunc(`vm.builtin.kv_state_${name}`),
  );
  const id = tvm.scalar(0, "int64");
  async function forward(tokens) {
    tvm.beginScope();
    const ids = tvm.empty([tokens.length], "int32", device).copyFrom(tokens);
    const hidden = embed(ids, params);
    const input = hidden.view([1, tokens.length, hidden.shape[1]]);
    begin(kv, one(0), one(tokens.length));
    const logits = (tokens.length > 1 ? prefill : decode)(input, kv, params).get(0);
    end(kv);
    const found = await get(state, logits);
    tvm.endScope();
    return found;
  }
  const runs = [];
  for (const { tokens, count } of job.generate) {
    clear(kv);
    add(kv, id);
    began = performance.now();
    let logits;
    for (let i = 0; i < tokens.length; i += job.chunk) logits = await forward(tokens.slice(i, i + job.chunk));
    const run = { tokens: [], logits: [], prefill: performance.now() - began };
    began = performance.now();
    while (run.tokens.length < count) {
      const values = new Float32Array(new Uint8Array(Buffer.from(logits.data, "base64")).buffer);
      let best = 0;
      for (let i = 1; i < values.length; ++i) if (values[i] > values[best]) best = i;
      run.tokens.push(best);
      if (job.logits) run.logits.push(logits);
      if (run.tokens.length < count) logits = await forward([best]);
    }
    run.decode = performance.now() - began;
    runs.push(run);
  }
  return { runs, times };
}

/** The page's engine makes its own device; errors of its kernels come back, too. */
async function chat({ bundle, engine: file, context, turns }) {
  offerGpu();
  const errors = [];
  const requestDevice = GPUAdapter.prototype.requestDevice;
  GPUAdapter.prototype.requestDevice = async function (descriptor) {
    const device = await requestDevice.call(this, descriptor);
    device.onuncapturederror = (event) => errors.push(event.error.message);
    return device;
  };
  const { PagesEngine } = require(file);
  const read = async (name) => new Uint8Array(fs.readFileSync(path.join(bundle, name))).buffer;
  const engine = await PagesEngine.load(await read("lib/model.wasm"), read, context, () => {});
  const greedy = { temperature: 0, topP: 1, repetitionPenalty: 1, presencePenalty: 0, frequencyPenalty: 0, seed: 0 };
  const answers = [];
  for (const { tokens: prompt, said, sampling } of turns) {
    const tokens = [];
    const finished = await engine.answer(prompt, said, { ...greedy, ...sampling }, (token) => tokens.push(token));
    answers.push({ tokens, reused: engine.reused, ...finished });
  }
  return { answers, errors };
}

async function callAll(state, job) {
  const { tvm } = state;
  const library = tvm.systemLib();
  const results = [];
  for (const { name, args, outputs } of job.calls) {
    const values = args.map((arg) => (typeof arg === "number" ? arg : put(state, arg)));
    library.getFunction(name)(...values);
    results.push(await Promise.all(outputs.map((index) => get(state, values[index]))));
  }
  return { results };
}

async function main() {
  const job = JSON.parse(fs.readFileSync(0, "utf8"));
  if (job.probe) {
    process.stdout.write(JSON.stringify(await probe()), () => process.exit(0));
    return;
  }
  if (job.engine) {
    process.stdout.write(JSON.stringify(await chat(job)), () => process.exit(0));
    return;
  }
  const state = await open(job.wasm || path.join(job.bundle, "lib", "model.wasm"));
  const result = await (job.bundle ? generate : callAll)(state, job);
  const { adapter, errors, sizes } = state;
  process.stdout.write(JSON.stringify({ ...result, ...sizes, adapter, errors }), () => process.exit(0));
}

main().catch((error) => {
  process.stderr.write(`${error.stack || error}\n`);
  process.exit(1);
});
