/** Answers of a server with OpenAI's API, streamed. */

import { ContextFull, type Answering, type ChatMessage, type Finished, type Sampling } from "./engine";

export class ServerError extends Error {
  constructor(readonly status: number, message: string) {
    super(message);
  }
}

/** Fetch a path of the server, with the key if there is one. Throws ServerError. */
export async function ask(url: string, key: string, options: RequestInit = {}): Promise<Response> {
  const authorization: Record<string, string> = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(url, { cache: "no-store", ...options, headers: { "Content-Type": "application/json", ...authorization } });
  if (response.ok) return response;
  const { error } = ((await response.json().catch(() => ({}))) as { error?: { message?: string; code?: unknown } }) ?? {};
  if (error?.code === "context_length_exceeded") throw new ContextFull(error.message);
  throw new ServerError(response.status, error?.message ?? `the server answers ${response.status}`);
}

interface Chunk {
  choices?: { delta: { content?: string; reasoning_content?: string }; finish_reason: string | null }[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
  error?: { message: string };
}

export class HttpEngine implements Answering {
  private running: AbortController | null = null;

  /** `model` is the one to ask, null for the server's own. */
  constructor(private readonly base: string, private readonly key: () => string, private readonly model: () => string | null = () => null) {}

  async chat(messages: ChatMessage[], sampling: Sampling, onText: (text: string) => void): Promise<Finished> {
    const stop = (this.running = new AbortController());
    const finished: Finished = { reason: "stop", promptTokens: 0, completionTokens: 0, prefillTokensPerSecond: null, decodeTokensPerSecond: null };
    let first = 0;
    let thinking = false;
    try {
      const response = await ask(`${this.base}v1/chat/completions`, this.key(), { method: "POST", body: body(this.model(), messages, sampling), signal: stop.signal });
      for await (const { choices, usage, error } of events(response.body!)) {
        if (error) throw new Error(error.message);
        for (const { delta, finish_reason } of choices ?? []) {
          const text = delta.content ?? "";
          if (delta.reasoning_content || text) first ||= performance.now();
          if (delta.reasoning_content) onText(delta.reasoning_content);
          if (text) onText(thinking ? `\n\n---\n\n${text}` : text);
          thinking = text ? false : thinking || !!delta.reasoning_content;
          if (delta.content || delta.reasoning_content) finished.completionTokens++;
          if (finish_reason === "length") finished.reason = "length";
        }
        if (usage) [finished.promptTokens, finished.completionTokens] = [usage.prompt_tokens, usage.completion_tokens];
      }
    } catch (error) {
      if (!stop.signal.aborted) throw error;
      finished.reason = "interrupted";
    }
    const seconds = (performance.now() - first) / 1000;
    return { ...finished, decodeTokensPerSecond: first && finished.completionTokens > 1 ? (finished.completionTokens - 1) / seconds : null };
  }

  stop(): void {
    this.running?.abort();
  }
}

function body(model: string | null, messages: ChatMessage[], sampling: Sampling): string {
  return JSON.stringify({
    ...(model === null ? {} : { model }),
    messages: messages.map(inParts),
    temperature: sampling.temperature,
    top_p: sampling.topP,
    max_tokens: sampling.maxTokens,
    repetition_penalty: sampling.repetitionPenalty,
    presence_penalty: sampling.presencePenalty,
    frequency_penalty: sampling.frequencyPenalty,
    ...(sampling.seed === null ? {} : { seed: sampling.seed }),
    stream: true,
    stream_options: { include_usage: true },
  });
}

function inParts({ role, content, pictures = [] }: ChatMessage): object {
  if (pictures.length === 0) return { role, content };
  const parts: object[] = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
}

/** The JSON of each server-sent event, until `[DONE]`. Throws where the stream ends before. */
export async function* events(stream: ReadableStream<Uint8Array>): AsyncGenerator<Chunk> {
  const reader = stream.pipeThrough(new TextDecoderStream() as TransformStream<Uint8Array, string>).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The server ended the answer before it was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop()!;
    for (const line of lines) {
      if (line.trim() === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6)) as Chunk;
    }
  }
}
