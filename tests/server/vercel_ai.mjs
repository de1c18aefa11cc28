// Vercel's AI SDK, unmodified: whole and streamed answers, a tool, an object, by each provider. For test_clients.py.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const { url: baseURL, name, prompt } = JSON.parse(process.argv[2]);
const given = { baseURL, apiKey: "none" };
const models = {
  compatible: createOpenAICompatible({ ...given, name: "local", supportsStructuredOutputs: true })(name),
  chat: createOpenAI(given).chat(name),
  responses: createOpenAI(given)(name),
  anthropic: createAnthropic(given)(name),
};
const clock = tool({ description: "The time in a city", inputSchema: z.object({ city: z.enum(["Bern", "Rome"]) }) });
const found = {};
for (const [kind, model] of Object.entries(models)) {
  const asked = { model, prompt, maxOutputTokens: 40, temperature: 0, maxRetries: 0 };
  const whole = await generateText(asked);
  let streamed = "";
  for await (const piece of streamText(asked).textStream) streamed += piece;
  const more = { ...asked, maxOutputTokens: 200 };
  const called = await generateText({ ...more, toolChoice: "required", tools: { clock } });
  const formed = await generateObject({ ...more, schema: z.object({ answer: z.enum(["yes", "no"]) }) });
  const calls = called.toolCalls.map((call) => [call.toolName, call.input.city]);
  found[kind] = { whole: whole.text, streamed, calls, reason: called.finishReason, formed: formed.object.answer };
}
process.stdout.write(JSON.stringify(found));
