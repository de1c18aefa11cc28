/** The engine for bundles whose runtime owns pages and slots: one conversation, whose next turn computes only what is new. */

import type { Answering, ChatMessage, Finished, Sampling } from "../engine";
import { Library, type Read } from "./library";
import { Memory } from "./memory";
import { stepIntegers } from "./step";
import { Texts, TextStream } from "./text";

interface Config {
  eos_token_id?: number | number[];
  conv_template: { stop_token_ids: number[] };
}

export class PagesEngine implements Answering {
  /** Tokens of the last prompt whose states were there already. */
  reused = 0;
  private stopped = false;

  private constructor(
    private readonly library: Library,
    private readonly memory: Memory,
    readonly texts: Texts,
    private readonly stopIds: ReadonlySet<number>,
  ) {}

  static async load(wasm: ArrayBuffer, read: Read, context: number, onProgress: (share: number) => void): Promise<PagesEngine> {
    const json = async (path: string): Promise<unknown> => JSON.parse(new TextDecoder().decode(await read(path)));
    const config = (await json("mlc-chat-config.json")) as Config;
    const stopIds = [...new Set([config.eos_token_id ?? [], config.conv_template.stop_token_ids].flat())];
    const texts = new Texts((await json("tokenizer.json")) as object, (await json("tokenizer_config.json")) as object, stopIds);
    const library = await Library.open(wasm, read, context, onProgress);
    const { states, units, limits } = library.facts;
    return new PagesEngine(library, new Memory(states, units, limits), texts, new Set(stopIds));
  }

  async chat(messages: readonly ChatMessage[], sampling: Sampling, onText: (text: string) => void): Promise<Finished> {
    const { tokens, said } = this.texts.prompt(messages);
    const stream = new TextStream((ids) => this.texts.decode(ids));
    const finished = await this.answer(tokens, said, sampling, (token) => {
      const text = stream.push(token);
      if (text) onText(text);
    });
    const rest = stream.push(null, true);
    if (rest) onText(rest);
    return finished;
  }

  /** Answer a prompt, whose first `said` tokens the next one probably begins with; `onToken` gets all but the last stop. */
  async answer(prompt: readonly number[], said: number, sampling: Sampling, onToken: (token: number) => void): Promise<Finished> {
    const { context } = this.library.facts;
    if (prompt.length >= context) {
      throw new Error(`the conversation has ${prompt.length} tokens; the context window size is ${context}`);
    }
    this.stopped = false;
    const began = performance.now();
    const random = sampling.seed === null ? Math.random : generator(sampling.seed);
    const counts = new Map<number, number>();
    const tokens = [...prompt];
    let [reason, count, first]: [Finished["reason"], number, number] = ["interrupted", 0, 0];
    try {
      this.reused = this.memory.begin(prompt);
      await this.prefill(prompt, said);
      while (!this.stopped) {
        const token = await this.draw(sampling, random, counts);
        first ||= performance.now();
        count++;
        if (this.stopIds.has(token)) reason = "stop";
        else {
          tokens.push(token);
          onToken(token);
          counts.set(token, (counts.get(token) ?? 0) + 1);
          if (count >= sampling.maxTokens || tokens.length >= context) reason = "length";
        }
        if (reason !== "interrupted") break;
        await this.next(tokens);
      }
    } catch (error) {
      this.memory.clear();
      throw error;
    }
    return {
      reason,
      promptTokens: prompt.length,
      completionTokens: count,
      prefillTokensPerSecond: perSecond(prompt.length - this.reused, first - began),
      decodeTokensPerSecond: perSecond(count - 1, performance.now() - first),
    };
  }

  stop(): void {
    this.stopped = true;
  }

  /** Compute what is missing of a prompt, and keep the states where the messages end. */
  private async prefill(prompt: readonly number[], said: number): Promise<void> {
    const { memory, library } = this;
    for (let begin = memory.tokens.length; begin < prompt.length && !this.stopped; begin = memory.tokens.length) {
      const border = begin < said && memory.keepsEnds ? said : prompt.length;
      this.compute("prefill", prompt.slice(begin, Math.min(border, begin + library.facts.chunk)), prompt.length);
      if (memory.tokens.length === said) memory.checkpoint();
      await library.computed();
    }
  }

  /** Compute the last token, or all where RoPE's frequencies change with it. */
  private async next(tokens: readonly number[]): Promise<void> {
    if (!this.memory.outgrows(tokens.length)) return this.compute("decode", tokens.slice(-1), tokens.length);
    this.memory.begin(tokens);
    await this.prefill(tokens, tokens.length);
  }

  private compute(kind: "prefill" | "decode", tokens: readonly number[], ropeLength: number): void {
    const span = this.memory.span(tokens.length, ropeLength);
    this.library.forward(kind, tokens, stepIntegers(span));
    this.memory.written(tokens, span);
  }

  private async draw(sampling: Sampling, random: () => number, counts: Map<number, number>): Promise<number> {
    const { temperature, topP, presencePenalty, frequencyPenalty, repetitionPenalty } = sampling;
    const penalized = presencePenalty !== 0 || frequencyPenalty !== 0 || repetitionPenalty !== 1;
    const token = await this.library.draw({
      temperature,
      topP,
      uniform: temperature > 0 ? random() : 0,
      counts: penalized ? counts : null,
      penalties: [presencePenalty, frequencyPenalty, repetitionPenalty],
    });
    if (token < 0) throw new Error("failed to sample a valid token");
    return token;
  }
}

function perSecond(count: number, ms: number): number | null {
  return count > 0 && ms > 0 ? (1000 * count) / ms : null;
}

/** Numbers in [0, 1) that follow from a seed: Mulberry32. */
export function generator(seed: number): () => number {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}
