import { readFileSync } from "node:fs";
import { expect, it } from "vitest";
import { ContextFull } from "../src/engine/engine";
import { asError } from "../src/engine/in_worker";

const WEBLLM = readFileSync(new URL("../node_modules/@mlc-ai/web-llm/lib/index.js", import.meta.url), "utf8");

it("says in words that the model computed NaN, which WebLLM calls an internal error", () => {
  const theirs = /if \(sampledToken < 0\) \{[^}]*?Error\("([^"]+)"\)/.exec(WEBLLM)![1]!;
  expect(asError({ name: "Error", message: theirs }).message).toContain("numbers that are not finite (NaN)");
});

it("knows a full context and passes other errors on", () => {
  expect(asError({ name: "ContextWindowSizeExceededError", message: "x" })).toBeInstanceOf(ContextFull);
  expect(asError({ name: "Error", message: "something else" }).message).toBe("something else");
});
