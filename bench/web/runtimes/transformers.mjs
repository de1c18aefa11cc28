// @huggingface/transformers on WebGPU; `options` has the dtype.
import { AutoModelForCausalLM, AutoTokenizer, BaseStreamer, env } from "@huggingface/transformers";

export const packages = ["@huggingface/transformers", "onnxruntime-web"];

class Clock extends BaseStreamer {
  times = [];
  put() {
    this.times.push(performance.now()); // first for the prompt, then for each token
  }
  end() {}
}

export async function open({ options }) {
  const dist = `${location.origin}/node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify`;
  env.allowLocalModels = false; // what is remote goes to the browser's cache
  env.remoteHost = location.origin;
  env.backends.onnx.wasm.wasmPaths = { mjs: `${dist}.mjs`, wasm: `${dist}.wasm` };
  const tokenizer = await AutoTokenizer.from_pretrained("model");
  const model = await AutoModelForCausalLM.from_pretrained("model", { device: "webgpu", ...options });
  return {
    async generate(prompt, count) {
      const streamer = new Clock();
      const limits = { max_new_tokens: count, eos_token_id: -1, do_sample: false };
      await model.generate({ ...tokenizer(prompt), ...limits, streamer });
      return streamer.times.slice(1);
    },
  };
}
