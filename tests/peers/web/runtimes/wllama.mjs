// @wllama/wllama: llama.cpp in wasm, on the CPU. Its model has a made-up vocabulary, so the prompt goes in as numbers.
import { Wllama } from "@wllama/wllama";

export const packages = ["@wllama/wllama"];

export async function open({ options, threads }) {
  const wllama = new Wllama({ default: "/node_modules/@wllama/wllama/esm/wasm/wllama.wasm" }, { suppressNativeLog: true });
  const settings = { n_ctx: 1024, n_threads: threads, n_gpu_layers: 0 };
  await wllama.loadModelFromUrl(`${location.origin}/model/resolve/main/${options.file}`, settings);
  if (threads > 1 && !wllama.isMultithread()) throw new Error("the page has no threads");
  return {
    async generate(prompt, count) {
      const times = [];
      await wllama.createCompletion({
        prompt: [...prompt].map((letter) => letter.charCodeAt(0) + 1000),
        max_tokens: count,
        temperature: 0,
        ignore_eos: true,
        cache_prompt: false,
        stream: true,
        onData: ({ choices }) => choices[0].finish_reason === null && times.push(performance.now()),
      });
      return times;
    },
  };
}
