/** A compiled library on the GPU: its weights, its states, and its functions `prefill`, `decode` and `sample`. */

import * as tvmjs from "@mlc-ai/web-runtime";
import { stateOf, unitsOf, unitsOfState, type State, type StateJson, type Units } from "../../model/states";
import type { RopeLimits } from "./memory";

/** The content of a file of the bundle. */
export type Read = (path: string) => Promise<ArrayBuffer>;

/** What a library says about its model, for a conversation of some length. */
export interface Facts {
  /** Tokens of a call of `prefill`, at most. */
  chunk: number;
  /** Tokens of the conversation, at most. */
  context: number;
  states: State[];
  /** Of each state, for such a conversation. */
  units: Units;
  limits: RopeLimits;
}

interface Weight {
  name: string;
  shape: number[];
  dtype: string;
}

interface Metadata {
  params: Weight[];
  states: StateJson[];
  model: {
    vocab_size: number;
    prefill_chunk: number;
    context_length: number;
    recompute_above: number | null;
    rope_above: number | null;
  };
}

interface TensorRecord extends Weight {
  byteOffset: number;
  nbytes: number;
}

export interface Draw {
  temperature: number;
  topP: number;
  /** In [0, 1). */
  uniform: number;
  /** How often tokens occurred in the answer; null if there are no penalties. */
  counts: Map<number, number> | null;
  penalties: [presence: number, frequency: number, repetition: number];
}

type Func = (...args: unknown[]) => unknown;

export class Library {
  readonly facts: Facts;
  private readonly metadata: Metadata;
  private readonly functions: Record<"prefill" | "decode" | "sample" | "apply_penalty_inplace", Func>;
  private readonly logits: { row: tvmjs.Tensor; cube: tvmjs.Tensor };
  private readonly found: tvmjs.Tensor;
  private readonly reused = new Map<string, { tensor: tvmjs.Tensor; values: Int32Array | Float32Array }>();
  private params: unknown;
  private states: unknown;

  private constructor(
    private readonly tvm: tvmjs.Instance,
    vm: tvmjs.VirtualMachine,
    private readonly device: tvmjs.DLDevice,
    wanted: number,
  ) {
    const keep = (name: string): Func => tvm.detachFromCurrentScope(vm.getFunction(name)) as unknown as Func;
    this.metadata = JSON.parse(String(keep("_metadata")())) as Metadata;
    const { model } = this.metadata;
    const states = this.metadata.states.map(stateOf);
    const context = Math.min(wanted, model.context_length);
    this.facts = {
      chunk: model.prefill_chunk,
      context,
      states,
      units: unitsOf(states, model.prefill_chunk, context),
      limits: { recomputeAbove: model.recompute_above, ropeAbove: model.rope_above },
    };
    const names = ["prefill", "decode", "sample", "apply_penalty_inplace"] as const;
    this.functions = Object.fromEntries(names.map((name) => [name, keep(name)])) as typeof this.functions;
    const row = this.empty([1, model.vocab_size], "float32");
    this.logits = { row, cube: tvm.detachFromCurrentScope(row.view([1, 1, model.vocab_size])) };
    this.found = tvm.detachFromCurrentScope(tvm.empty([1], "int32", tvm.cpu()));
  }

  /** @param context tokens of the conversation; the library may be for fewer */
  static async open(wasm: ArrayBuffer, read: Read, context: number, onProgress: (share: number) => void): Promise<Library> {
    const tvm = await tvmjs.instantiate(wasm, tvmjs.createPolyfillWASI(), () => undefined);
    const gpu = await tvmjs.detectGPUDevice();
    if (!gpu) throw new Error("the browser offers no WebGPU");
    tvm.initWebGPU(gpu.device);
    tvm.beginScope();
    try {
      const device = tvm.webgpu();
      const vm = tvm.detachFromCurrentScope(tvm.createVirtualMachine(device));
      const library = new Library(tvm, vm, device, context);
      await Promise.all([tvm.asyncLoadWebGPUPipelines(vm.getInternalModule()), library.loadWeights(read, onProgress)]);
      const { states, units } = library.facts;
      library.states = library.list(states.map((state) => library.empty([unitsOfState(states, state, units), state.unitItems], state.dtype)));
      return library;
    } finally {
      tvm.endScope();
    }
  }

  /** Compute tokens; the logits of the last one stay on the GPU for `draw`. A single one has decode's arithmetic. */
  forward(kind: "prefill" | "decode", tokens: readonly number[], step: Int32Array): void {
    const { functions, logits } = this;
    this.scoped(() => {
      const ids = this.integers("ids", tokens);
      const rows = kind === "prefill" ? [this.integers("rows", [tokens.length - 1])] : [];
      functions[kind](ids, ...rows, this.integers("step", step), logits.row, this.states, this.params);
    });
  }

  /** Wait for the GPU, so that a long prompt can be stopped and does not fill its queue. */
  async computed(): Promise<void> {
    await this.device.sync();
  }

  /** Sample from the logits -> the token; -1 if they are no numbers. */
  async draw({ temperature, topP, uniform, counts, penalties }: Draw): Promise<number> {
    const { functions, logits } = this;
    this.scoped(() => {
      if (counts !== null && counts.size > 0) {
        const zero = this.integers("zero", [0]);
        const entries = [Array(counts.size).fill(0), [...counts.keys()], [...counts.values()]].map((values, i) => this.integers(`entries${i}`, values));
        functions.apply_penalty_inplace(logits.row, zero, ...entries, this.put("penalties", [1, 3], "float32", Float32Array.from(penalties)));
      }
      const number = (name: string, value: number): tvmjs.Tensor => this.put(name, [1], "float32", Float32Array.of(value));
      const args = [number("temperature", temperature), number("topP", topP), this.integers("topK", [0]), number("minP", 0), number("uniform", uniform)];
      this.found.copyFrom(functions.sample(logits.cube, ...args) as tvmjs.Tensor);
    });
    await this.device.sync();
    return this.found.toArray()[0]!;
  }

  /** tvmjs's own `withNewScope` leaves the scope open after an error. */
  private scoped(action: () => void): void {
    this.tvm.beginScope();
    try {
      action();
    } finally {
      this.tvm.endScope();
    }
  }

  private integers(name: string, values: readonly number[] | Int32Array): tvmjs.Tensor {
    return this.put(name, [values.length], "int32", values instanceof Int32Array ? values : Int32Array.from(values));
  }

  /** A tensor with these values: the last one of this name, if it has the size. Each write ends a batch of launches. */
  private put(name: string, shape: number[], dtype: string, values: Int32Array | Float32Array): tvmjs.Tensor {
    const last = this.reused.get(name);
    const fits = last?.values.length === values.length;
    if (fits && last.values.every((value, i) => value === values[i])) return last.tensor;
    if (!fits) last?.tensor.dispose();
    const tensor = fits ? last.tensor : this.empty(shape, dtype);
    this.reused.set(name, { tensor, values });
    return tensor.copyFromRawBytes(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
  }

  private empty(shape: number[], dtype: string): tvmjs.Tensor {
    return this.tvm.detachFromCurrentScope(this.tvm.empty(shape, dtype, this.device));
  }

  private list(tensors: tvmjs.Tensor[]): unknown {
    return this.tvm.detachFromCurrentScope(this.tvm.makeTVMArray(tensors));
  }

  private async loadWeights(read: Read, onProgress: (share: number) => void): Promise<void> {
    const text = new TextDecoder().decode(await read("tensor-cache.json"));
    const { records } = JSON.parse(text) as { records: { dataPath: string; nbytes: number; records: TensorRecord[] }[] };
    checkWeights(this.metadata.params, records.flatMap((shard) => shard.records));
    const total = records.reduce((sum, { nbytes }) => sum + nbytes, 0);
    const tensors = new Map<string, tvmjs.Tensor>();
    let done = 0;
    for (const shard of records) {
      const bytes = await read(shard.dataPath);
      for (const { name, shape, dtype, byteOffset, nbytes } of shard.records) {
        tensors.set(name, this.empty(shape, dtype).copyFromRawBytes(new Uint8Array(bytes, byteOffset, nbytes)));
      }
      await this.device.sync(); // else all weights wait in memory for the GPU
      onProgress((done += shard.nbytes) / total);
    }
    this.params = this.list(this.metadata.params.map(({ name }) => tensors.get(name)!));
  }
}

/** The weights that a library asks for are those that the bundle has. */
export function checkWeights(wanted: Weight[], stored: Weight[]): void {
  const words = ({ dtype, shape }: Weight): string => `${dtype}[${shape.join(", ")}]`;
  const found = new Map(stored.map((weight) => [weight.name, words(weight)]));
  for (const weight of wanted) {
    const [expected, there] = [words(weight), found.get(weight.name) ?? "none"];
    if (expected !== there) {
      throw new Error(`the library and the weights are not of one bundle: ${weight.name}; expected ${expected}; found ${there}; compile the bundle again`);
    }
  }
}
