/** The state table: what a model keeps from step to step, and how much memory that takes (`mlcpipe/bundle/states.py`). */

export const PAGE_TOKENS = 16;
/** Slots kept for the ends of earlier prompts, in addition to the one that a step writes. */
export const CHECKPOINTS = 2;
const ITEM_BYTES: Record<string, number> = { uint32: 4, int32: 4, float32: 4, float16: 2, uint8: 1, int8: 1 };

/** A tensor `dtype[units, unitItems]`; a unit is a page of 16 tokens, or a slot for a sequence of any length. */
export interface State {
  kind: "pages" | "slot";
  /** Tokens that a query sees, itself included; 0: all. */
  window: number;
  dtype: string;
  unitItems: number;
  unitBytes: number;
}

/** Units of each state: pages by group, and slots. */
export interface Units {
  pages: number[];
  slots: number;
}

interface Shaped {
  dtype: string;
  shape: number[];
}

/** As a manifest or a library states it. */
export interface StateJson {
  kind: string;
  window?: number;
  dtype?: string;
  copies?: number;
  parts: Shaped[];
}

export function tensorBytes({ dtype, shape }: Shaped): number {
  return shape.reduce((n, d) => n * d, 1) * (ITEM_BYTES[dtype] ?? 4);
}

export function stateOf({ kind, window = 0, dtype = "int8", copies = 1, parts }: StateJson): State {
  const unitBytes = copies * parts.reduce((sum, part) => sum + tensorBytes(part), 0);
  return { kind: kind === "slot" ? "slot" : "pages", window, dtype, unitItems: unitBytes / (ITEM_BYTES[dtype] ?? 4), unitBytes };
}

/** The window of each group of pages, 0 (all tokens) first. There is always a group. */
export function windowsOf(states: State[]): number[] {
  const windows = new Set(states.filter(({ kind }) => kind === "pages").map(({ window }) => window));
  return windows.size > 0 ? [...windows].sort((a, b) => a - b) : [0];
}

/** What one conversation of `context` tokens needs, whose prompts are computed in chunks of `chunk` tokens. */
export function unitsOf(states: State[], chunk: number, context: number): Units {
  const all = Math.ceil(context / PAGE_TOKENS);
  // After the first group, whose table says where tokens go, only a window is kept, and another for the next prompt.
  const few = (window: number): number => Math.ceil((window + chunk) / PAGE_TOKENS) + 2 + Math.ceil(window / PAGE_TOKENS);
  return {
    pages: windowsOf(states).map((window, group) => (group > 0 ? Math.min(all, few(window)) : all)),
    slots: states.some(({ kind }) => kind === "slot") ? CHECKPOINTS + 1 : 0,
  };
}

export function unitsOfState(states: State[], state: State, units: Units): number {
  return state.kind === "slot" ? units.slots : units.pages[windowsOf(states).indexOf(state.window)]!;
}

export function statesBytes(states: State[], units: Units): number {
  return states.reduce((sum, state) => sum + state.unitBytes * unitsOfState(states, state, units), 0);
}
