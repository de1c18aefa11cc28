/** Conversations as data, and the user's changes as pure functions. */

import type { ChatMessage, Finished, Sampling } from "../engine/engine";

export interface AnswerStats extends Finished {
  /** Milliseconds from the question to the first text, as the user waits. */
  firstTokenMs: number | null;
}

export interface Message {
  id: string;
  role: "user" | "assistant";
  content: string;
  /** data: URLs that a question shows. */
  pictures?: readonly string[];
  /** Of an answer that has ended; null while it runs or after the page was closed in the middle. */
  stats: AnswerStats | null;
  /** In words, why an answer ended before its time. */
  error: string | null;
}

export interface Conversation {
  id: string;
  title: string;
  /** Whether the user chose the title. */
  named: boolean;
  /** Milliseconds since 1970. */
  created: number;
  updated: number;
  system: string;
  messages: Message[];
}

export const DEFAULT_SAMPLING: Sampling = {
  temperature: 0.7,
  topP: 0.95,
  maxTokens: 1024,
  repetitionPenalty: 1,
  presencePenalty: 0,
  frequencyPenalty: 0,
  seed: null,
};

const TITLE_LENGTH = 48;

export function newConversation(id: string, now: number, system: string): Conversation {
  return { id, title: "New chat", named: false, created: now, updated: now, system, messages: [] };
}

export function message(id: string, role: Message["role"], content: string, pictures: readonly string[] = []): Message {
  return { id, role, content, ...(pictures.length ? { pictures } : {}), stats: null, error: null };
}

/** Add a question and an empty answer. */
export function ask(chat: Conversation, question: Message, answer: Message, now: number): Conversation {
  const title = chat.named || chat.messages.length > 0 ? chat.title : titleOf(question.content);
  return { ...chat, title, updated: now, messages: [...chat.messages, question, answer] };
}

/** Change a question, and drop all messages after it. Unknown ids change nothing. */
export function edit(chat: Conversation, id: string, question: Message, answer: Message, now: number): Conversation {
  const at = chat.messages.findIndex((m) => m.id === id && m.role === "user");
  if (at < 0) return chat;
  return ask({ ...chat, messages: chat.messages.slice(0, at) }, question, answer, now);
}

/** Replace an answer, and all messages after it, by a new one. Unknown ids change nothing. */
export function regenerate(chat: Conversation, id: string, answer: Message, now: number): Conversation {
  const at = chat.messages.findIndex((m) => m.id === id && m.role === "assistant");
  if (at < 0) return chat;
  return { ...chat, updated: now, messages: [...chat.messages.slice(0, at), answer] };
}

export function replaceMessage(chat: Conversation, changed: Message, now: number): Conversation {
  return { ...chat, updated: now, messages: chat.messages.map((m) => (m.id === changed.id ? changed : m)) };
}

/**
 * The engine's input to continue a conversation: all before its last message, which is the empty answer.
 *
 * A question that got no answer is left out with it: one that was too long would stay too long for ever.
 */
export function prompt(chat: Conversation): ChatMessage[] {
  const system: ChatMessage[] = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  const before = chat.messages.slice(0, -1);
  const unanswered = (m: Message, next: Message | undefined) => m.role === "user" && next?.role === "assistant" && next.content === "";
  const kept = before.filter((m, i) => !(m.role === "assistant" && m.content === "") && !unanswered(m, before[i + 1]));
  return [...system, ...kept.map(({ role, content, pictures }) => ({ role, content, ...(pictures ? { pictures } : {}) }))];
}

/** The first words of a question. */
export function titleOf(text: string): string {
  const line = text.trim().replace(/\s+/g, " ");
  if (line.length <= TITLE_LENGTH) return line || "New chat";
  const cut = line.slice(0, TITLE_LENGTH);
  return `${cut.slice(0, cut.lastIndexOf(" ") > 20 ? cut.lastIndexOf(" ") : TITLE_LENGTH)}…`;
}

/** A conversation as Markdown, for a file. */
export function toMarkdown(chat: Conversation): string {
  const system = chat.system.trim() ? [`> ${chat.system.trim().replace(/\n/g, "\n> ")}`] : [];
  const shown = ({ pictures = [] }: Message) => (pictures.length ? `*(pictures: ${pictures.length})*\n\n` : "");
  const turns = chat.messages.map((m) => `**${m.role === "user" ? "You" : "Model"}**\n\n${shown(m)}${m.content.trim()}`);
  return [`# ${chat.title}`, ...system, ...turns].join("\n\n") + "\n";
}
