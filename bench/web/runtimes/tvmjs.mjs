// The same library driven by TVM's runtime alone: embed, forward pass and WebLLM's way of sampling, in a loop. What
// WebLLM takes longer for a token is its own. Shards are fetched at every start, which is nothing to compare.
export const packages = ["@mlc-ai/web-runtime"];

const MODEL = "/model/resolve/main/";
const json = async (name) => (await fetch(MODEL + name)).json();
const bytes = async (name) => (await fetch(MODEL + name)).arrayBuffer();

async function script(source) {
  const element = Object.assign(document.createElement("script"), { src: source });
  await new Promise((resolve, reject) => {
    Object.assign(element, { onload: resolve, onerror: () => reject(new Error(`${source} did not load`)) });
    document.head.append(element);
  });
}

async function parameters(tvm, device, vm) {
  const found = {};
  for (const shard of (await json("tensor-cache.json")).records) {
    const content = new Uint8Array(await bytes(shard.dataPath));
    for (const { name, shape, dtype, byteOffset, nbytes } of shard.records) {
      found[name] = tvm.empty(shape, dtype, device);
      found[name].copyFromRawBytes(content.subarray(byteOffset, byteOffset + nbytes));
    }
  }
  const { params } = JSON.parse(vm.getFunction("_metadata")().toString());
  return tvm.getGlobalFunc("ffi.Array")(...params.map(({ name }) => found[name]));
}

/** Greedy, by the kernels that WebLLM calls for any choice of a token. */
function sampler(tvm, device, vm, vocabulary) {
  const [softmax, argsort, topP] = ["softmax_with_temperature", "argsort_probs", "sample_with_top_p"].map((name) =>
    vm.getFunction(name),
  );
  const constant = (dtype, value) => tvm.empty([1], dtype, device).copyFrom([value]);
  const index = constant("int32", 0);
  return async (logits) => {
    const temperature = constant("float32", 1e-6);
    const probabilities = softmax(logits.view([1, 1, vocabulary]), temperature).view([1, vocabulary]);
    const sorted = argsort(probabilities);
    const uniform = tvm.uniform([1], 0, 1, device);
    const token = topP(sorted.get(0), sorted.get(1), uniform, index, constant("float32", 1));
    const host = tvm.empty([1], "int32", tvm.cpu()).copyFrom(token);
    await device.sync();
    return host.toArray()[0];
  };
}

export async function open() {
  await script("/node_modules/@mlc-ai/web-runtime/lib/index.js");
  const { tvmjs } = globalThis;
  const tvm = await tvmjs.instantiate(await bytes("lib/model.wasm"), tvmjs.createPolyfillWASI(), () => {});
  const gpu = await tvmjs.detectGPUDevice();
  if (!gpu) throw new Error("no adapter");
  tvm.initWebGPU(gpu.device);
  tvm.beginScope(); // holds until the page goes
  const device = tvm.webgpu();
  const vm = tvm.createVirtualMachine(device);
  await tvm.asyncLoadWebGPUPipelines(vm.getInternalModule());
  const weights = await parameters(tvm, device, vm);
  const config = await json("mlc-chat-config.json");
  const { context_window_size: context, prefill_chunk_size: chunk, vocab_size: vocabulary } = config;
  const { model } = await json("tokenizer.json");
  const one = (n) => tvm.makeShapeTuple([n]);
  const cache = vm.getFunction("create_tir_paged_kv_cache")(...[1, context, chunk, 16, 0].map(one));
  const [embed, prefill, decode] = ["embed", "prefill", "decode"].map((name) => vm.getFunction(name));
  const [begin, end, add, clear] = ["begin_forward", "end_forward", "add_sequence", "clear"].map((name) =>
    tvm.getGlobalFunc(`vm.builtin.kv_state_${name}`),
  );
  const sample = sampler(tvm, device, vm, vocabulary);
  const sequence = tvm.scalar(0, "int64");

  async function next(tokens) {
    tvm.beginScope();
    const ids = tvm.empty([tokens.length], "int32", device).copyFrom(tokens);
    const hidden = embed(ids, weights);
    begin(cache, one(0), one(tokens.length));
    const forward = tokens.length > 1 ? prefill : decode;
    const logits = forward(hidden.view([1, tokens.length, hidden.shape[1]]), cache, weights).get(0);
    end(cache);
    const token = await sample(logits);
    tvm.endScope();
    return token;
  }
  return {
    async generate(prompt, count) {
      clear(cache);
      add(cache, sequence);
      const times = [];
      let tokens = [...prompt].map((letter) => model.vocab[letter]);
      while (times.length < count) {
        tokens = [await next(tokens)];
        times.push(performance.now());
      }
      return times;
    },
  };
}
