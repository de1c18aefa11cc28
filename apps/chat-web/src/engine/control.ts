/**
 * A user's text is text: control tokens that messages write, such as `<|im_end|>`, are encoded as plain text.
 *
 * WebLLM puts messages between the strings of a template and has the whole encoded. So a sign that no message has is put
 * into each control token that one writes, after its first character; where the sign is, the text is cut when it is
 * encoded. Texts without such tokens are encoded as they are.
 */

import type { ChatMessage } from "./engine";

/** Signs that hardly anybody types; the first that no message has is taken. */
const FIRST_SIGN = 0x1d800;

export interface Encoder {
  encode(text: string): Int32Array;
}

/** Texts of the tokens of a tokenizer.json that are special, or end an answer. */
export function controlTokens(tokenizer: unknown, stopIds: readonly number[]): string[] {
  const added = (tokenizer as { added_tokens?: { id: number; content: string; special?: boolean }[] }).added_tokens ?? [];
  return added.filter(({ id, special }) => special || stopIds.includes(id)).map(({ content }) => content);
}

export class ControlTokens {
  private readonly pattern: RegExp | undefined;
  private sign = String.fromCodePoint(FIRST_SIGN);

  constructor(private readonly texts: readonly string[]) {
    const escaped = texts.filter((text) => text.trim()).map((text) => text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
    // Ahead of the text, to find those that begin inside another, too.
    if (escaped.length > 0) this.pattern = new RegExp(`(?=${escaped.join("|")}).`, "gsu");
  }

  /** The messages, with the sign in each control token. */
  mark(messages: readonly ChatMessage[]): ChatMessage[] {
    const { pattern } = this;
    if (!pattern) return [...messages];
    let code = FIRST_SIGN;
    while (messages.some(({ content }) => content.includes(String.fromCodePoint(code)))) code++;
    this.sign = String.fromCodePoint(code);
    // A token of one character has no other spelling: it is left out.
    const cut = (first: string): string => (this.texts.includes(first) ? "" : first) + this.sign;
    return messages.map((message) => ({ ...message, content: message.content.replace(pattern, cut) }));
  }

  /** Has a tokenizer cut texts at the sign. */
  watch(tokenizer: Encoder): void {
    const encode = tokenizer.encode.bind(tokenizer);
    tokenizer.encode = (text) => {
      const parts = text.split(this.sign);
      return parts.length === 1 ? encode(text) : Int32Array.from(parts.flatMap((part) => (part ? [...encode(part)] : [])));
    };
  }
}
