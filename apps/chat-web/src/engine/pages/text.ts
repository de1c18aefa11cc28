/** Messages to token ids, and token ids to text. */

import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { ControlTokens, controlTokens } from "../control";
import type { ChatMessage } from "../engine";

interface Settings {
  chat_template?: Record<string, string>;
  extra_special_tokens?: Record<string, string>;
  bos_token?: string;
  eos_token?: string;
}

export class Texts {
  private readonly tokenizer: Tokenizer;
  private readonly template: Template;
  private readonly control: ControlTokens;
  private readonly special: Record<string, string>;

  /** @param tokenizer tokenizer.json, @param settings tokenizer_config.json, @param stopIds tokens that end an answer */
  constructor(tokenizer: object, settings: Settings, stopIds: readonly number[]) {
    const source = settings.chat_template?.default;
    if (source === undefined) throw new Error("the model has no chat template: it does not know what a conversation is");
    this.tokenizer = new Tokenizer(tokenizer, settings);
    this.template = new Template(source);
    this.control = new ControlTokens(controlTokens(tokenizer, stopIds));
    this.control.watch(this);
    const named = Object.entries(settings).filter(([name, text]) => name.endsWith("_token") && typeof text === "string");
    this.special = { ...(Object.fromEntries(named) as Record<string, string>), ...settings.extra_special_tokens };
  }

  /** The prompt, and how many of its tokens are the messages without the beginning of the answer. */
  prompt(messages: readonly ChatMessage[]): { tokens: number[]; said: number } {
    const marked = this.control.mark(messages);
    const [said, tokens] = [false, true].map((add_generation_prompt) => {
      const variables = { messages: marked, tools: null, documents: null, add_generation_prompt, ...this.special };
      return [...this.encode(this.template.render(variables))];
    });
    const differs = said!.findIndex((token, index) => token !== tokens![index]);
    return { tokens: tokens!, said: differs < 0 ? said!.length : differs };
  }

  encode(text: string): Int32Array {
    return Int32Array.from(this.tokenizer.encode(text, { add_special_tokens: false }).ids);
  }

  decode(tokens: number[]): string {
    return tokens.length > 0 ? this.tokenizer.decode(tokens, { skip_special_tokens: true, clean_up_tokenization_spaces: false }) : "";
  }
}

/** The text of an answer as it grows: what a token adds depends on those before it. */
export class TextStream {
  private readonly tokens: number[] = [];
  private begin = 0;
  private end = 0;

  constructor(private readonly decode: (tokens: number[]) => string) {}

  /** The text that is complete with this token; half a character waits for the rest, unless it is the `last`. */
  push(token: number | null, last = false): string {
    if (token !== null) this.tokens.push(token);
    const before = this.decode(this.tokens.slice(this.begin, this.end));
    const text = this.decode(this.tokens.slice(this.begin));
    if (!last && (text.length <= before.length || text.endsWith("\ufffd"))) return "";
    [this.begin, this.end] = [this.end, this.tokens.length];
    return text.slice(before.length);
  }
}
