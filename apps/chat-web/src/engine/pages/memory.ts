/** What the states of the one conversation hold: its computed tokens, where they are, and what a new prompt can reuse. */

import { CHECKPOINTS, PAGE_TOKENS, windowsOf, type State, type Units } from "../../model/states";
import type { Span } from "./step";

/** Lengths from which RoPE's frequencies change, so that keys of shorter prompts are of no use: see the manifest. */
export interface RopeLimits {
  recomputeAbove: number | null;
  ropeAbove: number | null;
}

interface Checkpoint {
  length: number;
  slot: number;
}

export class Memory {
  /** Computed tokens. */
  tokens: number[] = [];
  /** The first page of each group that is still there: those with a window overwrite old ones. */
  private first: number[];
  private readonly windows: number[];
  /** What the slot holds, after all tokens; -1: nothing yet. */
  private slot = -1;
  private checkpoints: Checkpoint[] = [];
  private rope = "";

  constructor(
    states: State[],
    private readonly units: Units,
    private readonly limits: RopeLimits,
  ) {
    this.windows = windowsOf(states);
    this.first = this.windows.map(() => 0);
  }

  /** Forget all tokens, but those that `prompt` begins with and whose states are there -> how many stay. */
  begin(prompt: readonly number[]): number {
    const rope = this.ropeOf(prompt.length);
    let same = 0;
    while (same < prompt.length - 1 && same < this.tokens.length && prompt[same] === this.tokens[same]) same++;
    let from = this.rope === rope && this.reaches(same) ? same : 0;
    if (this.keepsEnds && from < this.tokens.length) {
      this.checkpoints = this.checkpoints.filter(({ length }) => length <= from);
      const last = this.checkpoints.at(-1);
      [from, this.slot] = last && this.reaches(last.length) ? [last.length, last.slot] : [0, -1];
    }
    if (from === 0) this.clear();
    this.rope = rope;
    this.tokens.length = from;
    return from;
  }

  /** The step that computes `rows` more tokens; `written` says when it was done. */
  span(rows: number, ropeLength: number): Span {
    const begin = this.tokens.length;
    const last = Math.floor((begin + rows - 1) / PAGE_TOKENS);
    const tables = this.units.pages.map((count, group) => {
      this.first[group] = Math.max(this.first[group]!, last - count + 1);
      return Array.from({ length: last + 1 }, (_, page) => (page < this.first[group]! ? -1 : page % count));
    });
    return { begin, rows, ropeLength, tables, slots: this.keepsEnds ? [this.slot, this.nextSlot()] : null };
  }

  written(tokens: readonly number[], span: Span): void {
    for (const token of tokens) this.tokens.push(token);
    if (span.slots) this.slot = span.slots[1];
  }

  /** Whether states are kept at certain tokens alone. */
  get keepsEnds(): boolean {
    return this.units.slots > 0;
  }

  /** Keep the states as they are now, for prompts that begin with the same tokens. */
  checkpoint(): void {
    if (!this.keepsEnds || this.checkpoints.at(-1)?.length === this.tokens.length) return;
    this.checkpoints.push({ length: this.tokens.length, slot: this.slot });
    this.checkpoints = this.checkpoints.slice(-CHECKPOINTS);
  }

  /** After a failed step nobody knows what the states hold. */
  clear(): void {
    this.tokens = [];
    this.first = this.first.map(() => 0);
    this.checkpoints = [];
    this.slot = -1;
    this.rope = "";
  }

  /** Whether a token at the end of a prompt of `length` needs the prompt to be computed again. */
  outgrows(length: number): boolean {
    return length - 1 === this.limits.recomputeAbove;
  }

  private reaches(length: number): boolean {
    return this.windows.every((window, group) => this.first[group]! <= firstPage(window, length));
  }

  private nextSlot(): number {
    const kept = new Set(this.checkpoints.map(({ slot }) => slot));
    if (this.slot >= 0 && !kept.has(this.slot)) return this.slot;
    return Array.from({ length: this.units.slots }, (_, slot) => slot).find((slot) => !kept.has(slot))!;
  }

  private ropeOf(length: number): string {
    const { recomputeAbove, ropeAbove } = this.limits;
    return `${recomputeAbove !== null && length > recomputeAbove} ${ropeAbove === null ? 0 : Math.max(length, ropeAbove)}`;
  }
}

/** The first page that a query at this position needs of a group with this window (0: all). */
function firstPage(window: number, position: number): number {
  return window > 0 ? Math.floor(Math.max(0, position + 1 - window) / PAGE_TOKENS) : 0;
}
