// @mlc-ai/web-llm with a bundle of mlcpipe: what the chat page uses.
import { CreateMLCEngine } from "@mlc-ai/web-llm";

export const packages = ["@mlc-ai/web-llm"];

export async function open() {
  const model = `${location.origin}/model/resolve/main/`;
  const record = { model, model_id: "model", model_lib: `${model}lib/model.wasm` };
  const engine = await CreateMLCEngine("model", { appConfig: { model_list: [record] } });
  return {
    async generate(prompt, count) {
      const settings = { max_tokens: count, temperature: 0, ignore_eos: true, stream: true };
      const times = [];
      for await (const chunk of await engine.completions.create({ prompt, ...settings })) {
        if (chunk.choices[0].finish_reason === null) times.push(performance.now());
      }
      return times;
    },
  };
}
