// @mlc-ai/web-llm with a bundle of mlcpipe: what the chat page uses.
import { CreateMLCEngine } from "@mlc-ai/web-llm";

export const packages = ["@mlc-ai/web-llm"];

export async function open() {
  const model = `${location.origin}/model/resolve/main/`;
  const record = { model, model_id: "model", model_lib: `${model}lib/model.wasm` };
  const engine = await CreateMLCEngine("model", { appConfig: { model_list: [record] } });
  return {
    async generate(prompt, count) {
      const request = { prompt, max_tokens: count, temperature: 0, ignore_eos: true };
      const stream = { stream: true, stream_options: { include_usage: true } };
      const times = [];
      let tokens;
      for await (const { choices, usage } of await engine.completions.create({ ...request, ...stream })) {
        if (choices[0]?.finish_reason === null) times.push(performance.now());
        tokens = usage?.prompt_tokens;
      }
      if (tokens !== prompt.length) throw new Error(`the prompt has ${tokens} tokens, expected ${prompt.length}`);
      return times;
    },
  };
}
