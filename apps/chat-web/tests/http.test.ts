import { afterEach, expect, it, vi } from "vitest";
import { DEFAULT_SAMPLING } from "../src/chat/conversation";
import { ContextFull } from "../src/engine/engine";
import { HttpEngine, ServerError } from "../src/engine/http";

afterEach(() => vi.unstubAllGlobals());

const chunk = (delta: object, finish: string | null = null) => ({ choices: [{ delta, finish_reason: finish }] });
const lines = (events: object[]) => events.map((event) => `data: ${JSON.stringify(event)}\n\n`).join("") + "data: [DONE]\n\n";

/** A server that answers with this text, cut into pieces of 7 bytes, and what it was asked. */
function serve(text: string, status = 200): { url: string; init: RequestInit }[] {
  const asked: { url: string; init: RequestInit }[] = [];
  const bytes = new TextEncoder().encode(text);
  const pull = (at: number, control: ReadableStreamDefaultController<Uint8Array>): number => {
    if (at >= bytes.length) control.close();
    else control.enqueue(bytes.slice(at, at + 7));
    return at + 7;
  };
  vi.stubGlobal("fetch", async (url: string, init: RequestInit) => {
    asked.push({ url, init });
    let at = 0;
    return new Response(new ReadableStream({ pull: (control) => void (at = pull(at, control)) }), { status });
  });
  return asked;
}

async function chat(key = ""): Promise<{ text: string; finished: unknown }> {
  let text = "";
  const finished = await new HttpEngine("http://s/", () => key).chat([{ role: "user", content: "Hi" }], { ...DEFAULT_SAMPLING, seed: 3 }, (more) => (text += more));
  return { text, finished };
}

it("reads an answer and its reasoning, whatever the pieces", async () => {
  const usage = { prompt_tokens: 5, completion_tokens: 9 };
  const events = [chunk({ role: "assistant", content: "" }), chunk({ reasoning_content: "Hm" }), chunk({ content: "Grüße" }), chunk({ content: " 🌍" }), chunk({}, "length"), { choices: [], usage }];
  const asked = serve(": ping\n\n" + lines(events));
  const { text, finished } = await chat("secret");
  expect(text).toBe("Hm\n\n---\n\nGrüße 🌍");
  expect(finished).toMatchObject({ reason: "length", promptTokens: 5, completionTokens: 9 });
  expect(asked[0]!.url).toBe("http://s/v1/chat/completions");
  expect(asked[0]!.init.headers).toMatchObject({ Authorization: "Bearer secret" });
  expect(JSON.parse(asked[0]!.init.body as string)).toMatchObject({ stream: true, seed: 3, messages: [{ role: "user", content: "Hi" }] });
});

it("names the chosen model, and shows pictures before the text", async () => {
  const asked = serve(lines([chunk({ content: "a" })]));
  const engine = new HttpEngine("http://s/", () => "", () => "other");
  const pictures = ["data:image/png;base64,AAAA"];
  await engine.chat([{ role: "user", content: "What?", pictures }, { role: "user", content: "", pictures }], DEFAULT_SAMPLING, () => undefined);
  const shown = { type: "image_url", image_url: { url: pictures[0] } };
  const sent = JSON.parse(asked[0]!.init.body as string) as { model: string; messages: unknown };
  expect(sent.model).toBe("other");
  expect(sent.messages).toEqual([
    { role: "user", content: [shown, { type: "text", text: "What?" }] },
    { role: "user", content: [shown] },
  ]);
});

it("says why there is no answer", async () => {
  const error = (code: string, message: string) => JSON.stringify({ error: { code, message } });
  serve(error("context_length_exceeded", "too long"), 400);
  await expect(chat()).rejects.toBeInstanceOf(ContextFull);
  serve(error("invalid_api_key", "wrong key"), 401);
  await expect(chat()).rejects.toEqual(new ServerError(401, "wrong key"));
  serve("<html>", 502);
  await expect(chat()).rejects.toThrow("the server answers 502");
  serve(lines([{ error: { message: "out of memory" } }]));
  await expect(chat()).rejects.toThrow("out of memory");
  serve(lines([chunk({ content: "half" })]).replace("data: [DONE]\n\n", ""));
  await expect(chat()).rejects.toThrow("before it was complete");
});
