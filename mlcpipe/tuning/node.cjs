// Measures WebGPU kernels in Node, with tvmjs on Dawn: one JSON job per line on stdin, one answer per line on stdout.
// tvmjs takes one library per process, so there is one `load` job.
//
// {"do": "device"} -> {"device"}: the adapter's vendor and architecture.
// {"do": "load", "wasm", "args": [{shape, dtype, path} or {number, dtype}], "outputs": [index], "copies"}
//   -> {"first", "apart"}: seconds of the first calls of `default` and `candidate`, which compile their shaders;
//   per output the largest difference between the two, and the default's largest magnitude.
// {"do": "pairs", "count", "seconds"} -> {"pairs"}: interleaved seconds per call of the loaded functions, each
//   over about `seconds`. Calls cycle through copies of the arguments.
"use strict";
const fs = require("fs");
const path = require("path");
const readline = require("readline");
const answers = process.stdout.write.bind(process.stdout);
console.log = console.error; // tvmjs writes to stdout, which is reserved for answers

function package_(name) {
  return require(require.resolve(name, { paths: process.argv.slice(2).map((folder) => path.resolve(folder)) }));
}

let gpu;
let tvmjs;
async function device() {
  if (gpu) return gpu;
  const { create, globals } = package_("webgpu");
  Object.assign(globalThis, globals);
  Object.defineProperty(globalThis, "navigator", { value: { gpu: create([]) }, configurable: true });
  tvmjs = package_("@mlc-ai/web-runtime");
  gpu = await tvmjs.detectGPUDevice();
  if (gpu === undefined) throw new Error("no WebGPU adapter");
  gpu.device.onuncapturederror = (event) => (gpu.error ??= event.error.message);
  return gpu;
}

let loaded;
async function load(job) {
  const { device: webgpu } = await device();
  gpu.error = undefined;
  const bytes = new Uint8Array(fs.readFileSync(job.wasm));
  const tvm = await tvmjs.instantiate(bytes.buffer, tvmjs.createPolyfillWASI(), () => {});
  tvm.initWebGPU(webgpu);
  tvm.beginScope();
  const gpuDevice = tvm.webgpu();
  const put = ({ shape, dtype, path, number }) => {
    if (number !== undefined) return dtype.startsWith("int") ? tvm.scalar(number, dtype) : number;
    return tvm.empty(shape, dtype, gpuDevice).copyFromRawBytes(new Uint8Array(fs.readFileSync(path)));
  };
  const argumentSets = Array.from({ length: job.copies }, () => job.args.map(put));
  const library = tvm.systemLib();
  const functions = ["default", "candidate"].map((name) => library.getFunction(name));
  const outputs = [];
  const first = [];
  for (const call of functions) {
    await gpuDevice.sync();
    const start = performance.now();
    call(...argumentSets[0]);
    await gpuDevice.sync();
    first.push((performance.now() - start) / 1e3);
    const results = job.outputs.map((index) => argumentSets[0][index]);
    const hosts = results.map((output) => tvm.empty(output.shape, output.dtype, tvm.cpu()).copyFrom(output));
    await gpuDevice.sync();
    outputs.push(hosts.map((host) => host.toArray().slice()));
  }
  if (gpu.error) throw new Error(gpu.error);
  loaded = { gpuDevice, argumentSets, functions };
  return { first, apart: outputs[0].map((expected, i) => apart(expected, outputs[1][i])) };
}

async function measure(job) {
  const { gpuDevice, argumentSets, functions } = loaded;
  let next = 0;
  async function seconds(call, calls) {
    await gpuDevice.sync();
    const start = performance.now();
    for (let i = 0; i < calls; ++i) call(...argumentSets[next++ % argumentSets.length]);
    await gpuDevice.sync();
    return (performance.now() - start) / 1e3 / calls;
  }
  const once = await seconds(functions[0], 1);
  const calls = Math.max(1, Math.ceil(job.seconds / Math.max(once, 1e-6)));
  await seconds(functions[1], calls);
  const pairs = [];
  for (let i = 0; i < job.count; ++i) {
    pairs.push([await seconds(functions[0], calls), await seconds(functions[1], calls)]);
  }
  if (gpu.error) throw new Error(gpu.error);
  return { pairs };
}

function apart(expected, actual) {
  let difference = 0;
  let largest = 0;
  for (let i = 0; i < expected.length; ++i) {
    const here = Math.abs(expected[i] - actual[i]);
    if (!(here <= difference)) difference = here;
    largest = Math.max(largest, Math.abs(expected[i]));
  }
  return [Number.isFinite(difference) ? difference : -1, largest];
}

async function answer(job) {
  try {
    if (job.do === "load") return await load(job);
    if (job.do === "pairs") return await measure(job);
    const { vendor, architecture } = (await device()).adapterInfo;
    return { device: `${vendor} ${architecture}`.trim() };
  } catch (error) {
    return { error: String(error.message || error).slice(0, 500) };
  }
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    answers(`${JSON.stringify(await answer(JSON.parse(line)))}\n`);
  }
  process.exit(0);
}

main();
