// @wllama/wllama: llama.cpp in wasm, on the CPU.
import { Wllama } from "@wllama/wllama";

export const packages = ["@wllama/wllama"];
export const onCpu = true;
// The model's made-up vocabulary has a token for each byte; llama.cpp puts <s> and a space of three bytes before the text.
const ADDED = 4;

export async function open({ options, threads }) {
  const wllama = new Wllama({ default: "/node_modules/@wllama/wllama/esm/wasm/wllama.wasm" }, { suppressNativeLog: true });
  const settings = { n_ctx: 1024, n_threads: threads, n_gpu_layers: 0 };
  await wllama.loadModelFromUrl(`${location.origin}/model/resolve/main/${options.file}`, settings);
  if (threads > 1 && !wllama.isMultithread()) throw new Error("the page has no threads");
  return {
    async generate(prompt, count) {
      const times = [];
      let tokens;
      await wllama.createCompletion({
        prompt: prompt.slice(ADDED),
        max_tokens: count,
        temperature: 0,
        ignore_eos: true,
        cache_prompt: false,
        stream: true,
        onData: ({ choices, usage }) => {
          if (choices[0].finish_reason === null) times.push(performance.now());
          tokens = usage?.prompt_tokens;
        },
      });
      if (tokens !== prompt.length) throw new Error(`the prompt has ${tokens} tokens, expected ${prompt.length}`);
      return times;
    },
  };
}
