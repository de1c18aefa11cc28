/** Conversations: kept in the database, answered by the engine, shared with other tabs. */

import {
  ask, edit, message, newConversation, prompt, regenerate, replaceMessage, type Conversation, type Message,
} from "../chat/conversation"; // prettier-ignore
import type { ChatDatabase } from "../chat/database";
import { ContextFull } from "../engine/engine";
import { words, type ModelSource } from "./model";
import type { Settings } from "./settings";
import { Store } from "./store";

export interface ChatsState {
  /** The latest first. */
  list: Conversation[];
  currentId: string | null;
  /** The answer that is being written here. */
  running: { chatId: string; messageId: string; stopping: boolean } | null;
  /** The current text for screen readers. */
  announcement: string;
}

/** What a user is told who shows a picture to a model of text. */
export const BLIND = "This model sees no pictures. Choose one that does, or start a new chat without them.";
const SAVE_EVERY_MS = 1000;

export class ChatsController {
  readonly state = new Store<ChatsState>({ list: [], currentId: null, running: null, announcement: "" });
  /** Where the next conversation starts: not stored before its first question. */
  private draft: Conversation | null = null;
  private readonly channel: BroadcastChannel;

  constructor(
    private readonly db: ChatDatabase,
    private readonly model: ModelSource,
    private readonly settings: Store<Settings>,
    name: string,
  ) {
    this.channel = new BroadcastChannel(name);
    this.channel.onmessage = () => void this.reload();
    model.onEngineGone = (reason) => reason && this.announce(reason);
  }

  async start(): Promise<void> {
    await this.reload();
    const latest = this.state.get().list[0];
    this.state.patch({ currentId: latest?.id ?? null });
  }

  current(): Conversation {
    const { list, currentId } = this.state.get();
    const current = list.find((chat) => chat.id === currentId);
    if (current) return current;
    this.draft ??= newConversation(newId(), Date.now(), this.settings.get().system);
    return this.draft;
  }

  open(id: string): void {
    this.state.patch({ currentId: id });
  }

  startNew(): void {
    this.draft = null;
    this.state.patch({ currentId: null, announcement: "New chat" });
  }

  async send(text: string, pictures: readonly string[] = []): Promise<void> {
    const chat = this.current();
    const stored = this.state.get().list.some(({ id }) => id === chat.id);
    if (!stored) {
      await this.db.add(chat);
      this.draft = null;
      this.state.patch({ list: [chat, ...this.state.get().list], currentId: chat.id });
    }
    const question = message(newId(), "user", text, pictures);
    await this.answer(chat.id, (c, answer) => ask(c, question, answer, Date.now()));
  }

  async edit(id: string, text: string): Promise<void> {
    const question = message(newId(), "user", text, this.current().messages.find((m) => m.id === id)?.pictures);
    await this.answer(this.current().id, (c, answer) => edit(c, id, question, answer, Date.now()));
  }

  async regenerate(id: string): Promise<void> {
    await this.answer(this.current().id, (c, answer) => regenerate(c, id, answer, Date.now()));
  }

  stop(): void {
    const { running } = this.state.get();
    if (!running || running.stopping) return;
    this.state.patch({ running: { ...running, stopping: true } });
    this.model.engine?.stop();
  }

  async rename(id: string, title: string): Promise<void> {
    const clean = title.trim().slice(0, 200);
    if (clean) await this.change(id, (chat) => ({ ...chat, title: clean, named: true }));
  }

  /** The system prompt of the open conversation, and of new ones. */
  async setSystem(system: string): Promise<void> {
    this.settings.patch({ system });
    const chat = this.current();
    if (chat === this.draft) {
      this.draft = { ...chat, system };
      this.state.set({ ...this.state.get() });
    } else await this.change(chat.id, (c) => ({ ...c, system }));
  }

  async remove(id: string): Promise<void> {
    if (this.state.get().running?.chatId === id) this.stop();
    await this.db.remove(id);
    if (this.state.get().currentId === id) this.startNew();
    await this.changed();
  }

  async removeAll(): Promise<void> {
    this.stop();
    await this.db.clear();
    this.startNew();
    await this.changed();
  }

  private async answer(chatId: string, extend: (chat: Conversation, answer: Message) => Conversation): Promise<void> {
    const { engine } = this.model;
    if (!engine || this.state.get().running) return;
    let answer = message(newId(), "assistant", "");
    this.state.patch({ running: { chatId, messageId: answer.id, stopping: false }, announcement: "The model is answering" });
    const asked = await this.change(chatId, (chat) => extend(chat, answer));
    if (!asked) return this.state.patch({ running: null });
    const started = performance.now();
    let firstTokenMs: number | null = null;
    let saved = started;
    const onText = (text: string): void => {
      firstTokenMs ??= performance.now() - started;
      answer = { ...answer, content: answer.content + text };
      this.show(replaceMessage(this.find(chatId) ?? asked, answer, Date.now()));
      if (performance.now() - saved > SAVE_EVERY_MS) {
        saved = performance.now();
        void this.save(chatId, answer);
      }
    };
    try {
      const messages = prompt(asked);
      if (!this.model.state.get().sees && messages.some(({ pictures }) => pictures)) throw new Error(BLIND);
      const stats = await engine.chat(messages, this.settings.get().sampling, onText);
      answer = { ...answer, stats: { ...stats, firstTokenMs } };
      this.announce(stats.reason === "interrupted" ? "Stopped" : `The model answered: ${answer.content}`);
    } catch (error) {
      answer = { ...answer, error: this.explain(error) };
      this.announce(answer.error!);
    }
    try {
      // Stored before it counts as ended: an answer neither running nor stored would look cut off.
      await this.save(chatId, answer);
    } finally {
      this.state.patch({ running: null });
    }
  }

  private explain(error: unknown): string {
    const { phase, contextTokens } = this.model.state.get();
    if (error instanceof ContextFull) {
      return `The conversation is longer than the ${contextTokens} tokens that the model can look back on. Start a new chat, or edit an earlier question.`;
    }
    if (phase.name === "lost") return "The GPU was lost before the answer was complete.";
    if (phase.name === "elsewhere") return "The model moved to another tab before the answer was complete.";
    return words(error);
  }

  private announce(announcement: string): void {
    this.state.patch({ announcement });
  }

  private find(id: string): Conversation | undefined {
    return this.state.get().list.find((chat) => chat.id === id);
  }

  private show(chat: Conversation): void {
    this.state.patch({ list: this.state.get().list.map((c) => (c.id === chat.id ? chat : c)) });
  }

  private async save(chatId: string, answer: Message): Promise<void> {
    await this.change(chatId, (chat) => replaceMessage(chat, answer, Date.now()));
  }

  private async change(id: string, change: (chat: Conversation) => Conversation): Promise<Conversation | null> {
    const result = await this.db.update(id, change);
    await this.changed();
    return result;
  }

  private async changed(): Promise<void> {
    this.channel.postMessage("changed");
    await this.reload();
  }

  private async reload(): Promise<void> {
    const list = await this.db.all();
    // Text since the last save is only here.
    const { running } = this.state.get();
    const live = running && this.find(running.chatId)?.messages.find((m) => m.id === running.messageId);
    const merged = list.map((chat) => (live && chat.id === running.chatId ? keepLonger(chat, live) : chat));
    this.state.patch({ list: merged });
  }
}

/** `crypto.randomUUID` is for https alone; a server's page may come over plain http. */
function newId(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function keepLonger(chat: Conversation, live: Message): Conversation {
  const stored = chat.messages.find((m) => m.id === live.id);
  const ended = stored && (stored.stats !== null || stored.error !== null);
  return stored && !ended && live.content.length > stored.content.length ? replaceMessage(chat, live, chat.updated) : chat;
}
