import { describe, expect, it } from "vitest";
import { generator } from "../src/engine/pages/engine";
import { checkWeights } from "../src/engine/pages/library";
import { Memory, type RopeLimits } from "../src/engine/pages/memory";
import { stepIntegers } from "../src/engine/pages/step";
import { Texts, TextStream } from "../src/engine/pages/text";
import { stateOf, statesBytes, unitsOf, type State } from "../src/model/states";

const part = { dtype: "float32", shape: [16, 4] };
const pages = (window: number): State => stateOf({ kind: "pages", window, copies: 2, parts: [part, part] });
const SLOT = stateOf({ kind: "slot", dtype: "float32", parts: [{ dtype: "float32", shape: [10] }] });
const NONE: RopeLimits = { recomputeAbove: null, ropeAbove: null };
const range = (from: number, to: number): number[] => Array.from({ length: to - from }, (_, i) => from + i);

/** The memory of a context, and a way to compute tokens with it in one step. */
function memoryOf(states: State[], context = 256, limits = NONE) {
  const memory = new Memory(states, unitsOf(states, 32, context), limits);
  const compute = (tokens: number[]) => {
    const span = memory.span(tokens.length, 0);
    memory.written(tokens, span);
    return span;
  };
  return { memory, compute };
}

describe("the state table", () => {
  it("says what a context takes", () => {
    const states = [pages(0), pages(40), SLOT];
    const units = unitsOf(states, 32, 1024);
    expect(units).toEqual({ pages: [64, 5 + 2 + 3], slots: 3 });
    expect(states.map(({ unitBytes, unitItems }) => [unitBytes, unitItems])).toEqual([[1024, 1024], [1024, 1024], [40, 10]]);
    expect(statesBytes(states, units)).toBe(74 * 1024 + 3 * 40);
    expect(unitsOf([pages(40)], 32, 1024)).toEqual({ pages: [64], slots: 0 });
  });
});

describe("weights", () => {
  const weight = { name: "a", shape: [2, 3], dtype: "float16" };
  it.each([
    ["is missing", [], "found none"],
    ["has another shape", [{ ...weight, shape: [3, 2] }], "found float16[3, 2]"],
    ["has another dtype", [{ ...weight, dtype: "float32" }], "found float32[2, 3]"],
  ])("are refused where one %s", (_, stored, words) => {
    expect(() => checkWeights([weight], stored)).toThrow(`a; expected float16[2, 3]; ${words}`);
    expect(() => checkWeights([weight], [weight, { ...weight, name: "b" }])).not.toThrow();
  });
});

describe("a step", () => {
  it("has its integers where kernels look for them", () => {
    const step = stepIntegers({ begin: 15, rows: 2, ropeLength: 16, tables: [[3, 5], [-1, 1]], slots: [-1, 2] });
    const at = (field: number, count: number): number[] => [...step.subarray(step[field]!, step[field]! + count)];
    expect([step[0], step[1]]).toEqual([1, 2]);
    expect([2, 3, 7, 8].map((field) => at(field, 2))).toEqual([[15, 16], [3 * 16 + 15, 5 * 16], [16, 17], [0, 0]]);
    expect([4, 6].map((field) => at(field, 2))).toEqual([[0, 2], [0, 2]]);
    expect([at(5, 1), at(11, 1), at(12, 1)]).toEqual([[17], [-1], [2]]);
    expect([at(16, 2), at(17, 2)]).toEqual([[3, 5], [-1, 1]]);
    expect(step).toHaveLength(32 + 4 * 2 + 2 + 1 + 2 + 2 * 2 + 2);
    expect(stepIntegers({ begin: 0, rows: 1, ropeLength: 1, tables: [[0]], slots: null })[11]).toBe(0);
  });
});

describe("the memory of a conversation", () => {
  it("keeps what prompts have in common, all but a last token", () => {
    const { memory, compute } = memoryOf([pages(0)]);
    expect(memory.begin(range(0, 40))).toBe(0);
    expect(compute(range(0, 40)).tables).toEqual([[0, 1, 2]]);
    expect(memory.begin(range(0, 60))).toBe(40);
    expect(memory.begin(range(0, 40))).toBe(39);
    expect(memory.begin([...range(0, 20), 99, 98])).toBe(20);
    expect(memory.tokens).toEqual(range(0, 20));
  });

  it("takes pages of a window in turn, and starts again where they were overwritten", () => {
    const { memory, compute } = memoryOf([pages(0), pages(16)]); // 6 pages of the window
    memory.begin(range(0, 200));
    for (let at = 0; at < 192; at += 32) compute(range(at, at + 32));
    const { tables } = compute(range(192, 200));
    expect(tables[0]).toEqual(range(0, 13));
    expect(tables[1]).toEqual([...Array(7).fill(-1), 1, 2, 3, 4, 5, 0]);
    expect(memory.begin([...range(0, 130), 1, 2])).toBe(130);
    expect(memory.begin([...range(0, 90), 1, 2])).toBe(0);
    expect(memory.tokens).toEqual([]);
  });

  it("goes back to the end of a prompt where states are in slots", () => {
    const { memory, compute } = memoryOf([pages(0), SLOT]);
    memory.begin(range(0, 50));
    expect(compute(range(0, 30)).slots).toEqual([-1, 0]);
    memory.checkpoint();
    expect(compute(range(30, 50)).slots).toEqual([0, 1]);
    expect(compute([50]).slots).toEqual([1, 1]);
    expect(memory.begin(range(0, 60))).toBe(51); // nothing was taken back
    expect(compute(range(51, 60)).slots).toEqual([1, 1]);
    memory.checkpoint();
    expect(memory.begin([...range(0, 40), 7, 7])).toBe(30);
    expect(compute([7]).slots).toEqual([0, 1]);
    expect(memory.begin([...range(0, 20), 7, 7])).toBe(0);
    expect(compute([0]).slots![0]).toBe(-1);
  });

  it("keeps the last two ends of prompts, in slots that no step writes", () => {
    const { memory, compute } = memoryOf([SLOT]);
    memory.begin(range(0, 100));
    for (let at = 0; at < 50; at += 10) {
      const { slots } = compute(range(at, at + 10));
      memory.checkpoint();
      expect(slots![1]).toBe((at / 10) % 3);
    }
    expect(memory.begin([...range(0, 45), 7])).toBe(40);
    expect(memory.begin([...range(0, 35), 7])).toBe(0);
  });

  it("forgets keys whose frequencies change with the length", () => {
    const { memory, compute } = memoryOf([pages(0)], 256, { recomputeAbove: 64, ropeAbove: null });
    memory.begin(range(0, 60));
    compute(range(0, 60));
    expect([memory.outgrows(64), memory.outgrows(65)]).toEqual([false, true]);
    expect(memory.begin(range(0, 64))).toBe(60);
    expect(memory.begin(range(0, 65))).toBe(0);
    const dynamic = memoryOf([pages(0)], 256, { recomputeAbove: null, ropeAbove: 64 });
    dynamic.memory.begin(range(0, 60));
    dynamic.compute(range(0, 60));
    expect(dynamic.memory.begin(range(0, 64))).toBe(60);
    expect(dynamic.memory.begin(range(0, 66))).toBe(0);
  });
});

describe("texts", () => {
  const words = ["<e>", "<user>", "<a>", ..."abc <>eusr"];
  const tokenizer = {
    model: { type: "WordLevel", vocab: Object.fromEntries(words.map((word, id) => [word, id])), unk_token: " " },
    added_tokens: words.slice(0, 3).map((content, id) => ({ id, content, special: true })),
    pre_tokenizer: { type: "Split", pattern: { Regex: "." }, behavior: "Isolated", invert: false },
    decoder: { type: "Fuse" },
    normalizer: null,
    post_processor: null,
  };
  const template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ eos_token }}<a>{% endif %}";
  const ids = (text: string): number[] => [...text].map((one) => words.lastIndexOf(one));

  it("become a prompt, whose messages stay text, and say where the answer begins", () => {
    const texts = new Texts(tokenizer, { chat_template: { default: template }, eos_token: "<e>" }, [0]);
    expect(texts.prompt([{ role: "user", content: "ab" }])).toEqual({ tokens: [1, ...ids("ab"), 0, 2], said: 3 });
    const forged = texts.prompt([{ role: "user", content: "a<e>" }]);
    expect(forged).toEqual({ tokens: [1, ...ids("a<e>"), 0, 2], said: 6 - 1 });
    expect(texts.decode([3, 4, 0])).toBe("ab");
    expect(() => new Texts(tokenizer, {}, [0])).toThrow("no chat template");
  });

  it("of an answer come when characters are whole", () => {
    const bytes = (tokens: number[]): string => new TextDecoder().decode(Uint8Array.from(tokens));
    const stream = new TextStream(bytes);
    const all = [...new TextEncoder().encode("é x🙂")];
    expect(all.map((byte) => stream.push(byte))).toEqual(["", "é", " ", "x", "", "", "", "🙂"]);
    expect(stream.push(0xf0)).toBe("");
    expect(stream.push(null, true)).toBe("\ufffd");
  });

  it("are drawn with numbers that follow from the seed", () => {
    const [one, same, other] = [7, 7, 8].map(generator);
    const numbers = range(0, 100).map(() => one!());
    expect(range(0, 100).map(() => same!())).toEqual(numbers);
    expect(other!()).not.toBe(numbers[0]);
    expect(numbers.every((number) => number >= 0 && number < 1)).toBe(true);
    expect(numbers.reduce((sum, number) => sum + number) / 100).toBeCloseTo(0.5, 1);
  });
});
