/** Whether a model can run here, said before it is downloaded. */

import { bytes } from "./format";
import type { Manifest } from "./manifest";
import { PAGE_TOKENS, statesBytes, unitsOf, windowsOf } from "./states";

/** The browser's facts about the GPU. */
export interface Adapter {
  name: string;
  /** A software adapter: works, slowly. */
  fallback: boolean;
  features: string[];
  /** Invocations of each of its subgroups; null if they differ, or the browser does not tell. */
  subgroupSize: number | null;
  maxBufferSize: number;
  maxStorageBufferBindingSize: number;
  maxStorageBuffersPerShaderStage: number;
  maxComputeWorkgroupStorageSize: number;
  maxComputeInvocationsPerWorkgroup: number;
}

export interface MemoryEstimate {
  weights: number;
  cache: number;
  workspace: number;
  total: number;
}

/** Why a model is not started, and what the user can do. `overridable`: it is an estimate, the user may know better. */
export interface Refusal {
  title: string;
  text: string;
  overridable: boolean;
}

// Both engines require of an adapter (`detectGPUDevice` of tvmjs): they take 1 GiB buffers if available, else the
// second figure, and fail below that.
const MIB = 1 << 20;
const ENGINE = { buffer: [1024 * MIB, 256 * MIB], binding: [1024 * MIB, 128 * MIB], workgroup: 32 << 10, buffers: 10 };
/** The share of the device's memory that a browser may take before the system gets into trouble. */
const SHARE = 0.6;

/** Bytes on the GPU with a context of so many tokens. */
export function estimateMemory(manifest: Manifest, contextTokens: number): MemoryEstimate {
  const { states, prefillChunk, kvCache } = manifest;
  const all = { pages: windowsOf(states).map(() => contextTokens / PAGE_TOKENS), slots: 0 }; // that TVM's cache has
  const cache = statesBytes(states, kvCache === "pages" ? unitsOf(states, prefillChunk, contextTokens) : all);
  const total = manifest.weightsBytes + cache + manifest.workspaceBytes;
  return { weights: manifest.weightsBytes, cache, workspace: manifest.workspaceBytes, total };
}

/** The largest context, of the halves of the model's, that fits in the device's memory; the smallest if none does. */
export function suggestContext(manifest: Manifest, deviceMemory: number | null): number {
  let tokens = manifest.contextLength;
  if (deviceMemory === null) return tokens;
  while (tokens > 1024 && estimateMemory(manifest, tokens).total > deviceMemory * SHARE) tokens = Math.ceil(tokens / 2);
  return tokens;
}

/**
 * @param deviceMemory bytes of RAM that the browser reports (`navigator.deviceMemory`), null if it does not
 */
export function checkFit(
  manifest: Manifest,
  adapter: Adapter,
  estimate: MemoryEstimate,
  deviceMemory: number | null,
): Refusal | null {
  const buffer = granted(adapter.maxBufferSize, ENGINE.buffer);
  const binding = granted(adapter.maxStorageBufferBindingSize, ENGINE.binding);
  const single = Math.min(buffer, binding);
  const hard = (text: string): Refusal => ({ title: "This GPU cannot run the model", text, overridable: false });
  if (adapter.maxComputeWorkgroupStorageSize < ENGINE.workgroup) {
    return hard(`The engine needs 32 kB of workgroup memory; ${adapter.name} offers ${adapter.maxComputeWorkgroupStorageSize} bytes.`);
  }
  if (adapter.maxStorageBuffersPerShaderStage < ENGINE.buffers) {
    return hard(
      `The engine needs ${ENGINE.buffers} storage buffers in a shader; ${adapter.name} offers ` +
        `${adapter.maxStorageBuffersPerShaderStage}. A newer browser may offer more.`,
    );
  }
  if (single === 0) {
    return hard(`${adapter.name} offers buffers of ${bytes(Math.min(adapter.maxBufferSize, adapter.maxStorageBufferBindingSize))}; the engine needs 128 MB or more.`);
  }
  if (manifest.largestTensorBytes > single) {
    return hard(
      `Its largest weight takes ${bytes(manifest.largestTensorBytes)} in one piece; ${adapter.name} lets a program use ` +
        `${bytes(single)} at once. Try another browser or GPU, or a smaller model.`,
    );
  }
  if (deviceMemory !== null && estimate.total > deviceMemory * SHARE) {
    return {
      title: "The model probably does not fit",
      text:
        `It needs about ${bytes(estimate.total)} of GPU memory. This device reports ${bytes(deviceMemory)} of memory in ` +
        `all, of which a page can count on ${bytes(deviceMemory * SHARE)}. A smaller model, or one with fewer bits per weight, needs less.`,
      overridable: true,
    };
  }
  return null;
}

/** Refuses a download that the browser has no room for, and says why. */
export function checkStorage(needed: number, quota: StorageEstimate): Refusal | null {
  if (quota.quota === undefined || quota.usage === undefined) return null;
  const free = Math.max(0, quota.quota - quota.usage);
  if (needed <= free) return null;
  return {
    title: "Not enough room in the browser",
    text:
      `The model's files need ${bytes(needed)} more; the browser lets this site store ${bytes(free)} more ` +
      `(${bytes(quota.usage)} of ${bytes(quota.quota)} are used). Free space on the disk, leave private browsing, or delete other sites' data.`,
    overridable: false,
  };
}

function granted(limit: number, steps: number[]): number {
  return steps.find((step) => step <= limit) ?? 0;
}
