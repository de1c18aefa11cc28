/** The user's settings, kept in this browser. */

import { DEFAULT_SAMPLING } from "../chat/conversation";
import type { Sampling } from "../engine/engine";
import { Store } from "./store";

export type Theme = "system" | "light" | "dark";

export interface Settings {
  sampling: Sampling;
  /** System prompt of new conversations. */
  system: string;
  /** Tokens; null leaves it to the memory of the device. */
  contextTokens: number | null;
  theme: Theme;
}

export interface Knob {
  key: Exclude<keyof Sampling, "seed">;
  label: string;
  help: string;
  min: number;
  max: number;
  step: number;
}

export const KNOBS: Knob[] = [
  { key: "temperature", label: "Temperature", help: "How freely words are drawn; 0 always takes the likeliest.", min: 0, max: 2, step: 0.05 },
  { key: "topP", label: "Top-p", help: "Draw from the likeliest words that hold this share.", min: 0.05, max: 1, step: 0.05 },
  { key: "maxTokens", label: "Longest answer", help: "In tokens, about ¾ of a word each.", min: 16, max: 4096, step: 16 },
  { key: "repetitionPenalty", label: "Repetition penalty", help: "Above 1 avoids what was said before.", min: 1, max: 2, step: 0.05 },
  { key: "presencePenalty", label: "Presence penalty", help: "Above 0 favours new subjects.", min: -2, max: 2, step: 0.1 },
  { key: "frequencyPenalty", label: "Frequency penalty", help: "Above 0 avoids words used often.", min: -2, max: 2, step: 0.1 },
];

const DEFAULTS: Settings = { sampling: DEFAULT_SAMPLING, system: "", contextTokens: null, theme: "system" };

export function openSettings(key: string, storage: Storage): Store<Settings> {
  const store = new Store(read(storage.getItem(key)));
  store.watch(() => storage.setItem(key, JSON.stringify(store.get())));
  return store;
}

/** The stored settings, each value checked: an older page or a person may have written them. */
export function read(text: string | null): Settings {
  let stored: Record<string, unknown> = {};
  try {
    const value: unknown = JSON.parse(text ?? "{}");
    if (typeof value === "object" && value !== null) stored = value as Record<string, unknown>;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  const given = (typeof stored.sampling === "object" && stored.sampling !== null ? stored.sampling : {}) as Record<string, unknown>;
  const sampling = { ...DEFAULT_SAMPLING };
  for (const { key, min, max } of KNOBS) {
    const value = given[key];
    if (typeof value === "number" && value >= min && value <= max) sampling[key] = value;
  }
  if (Number.isSafeInteger(given.seed)) sampling.seed = given.seed as number;
  const context = stored.contextTokens;
  return {
    sampling,
    system: typeof stored.system === "string" ? stored.system : DEFAULTS.system,
    contextTokens: Number.isSafeInteger(context) && (context as number) > 0 ? (context as number) : null,
    theme: stored.theme === "light" || stored.theme === "dark" ? stored.theme : "system",
  };
}
