// Measures one runtime in this page and leaves the result in `globalThis.result`. The job in the address has a kind:
// speed, first_token, or fill: a first visit that leaves all files in the browser's caches.
//
// A runtime is a module with `packages` (names), `onCpu` if it needs no adapter, and `open(job) -> {generate}`.
// `generate(prompt, count)` continues a text, of which each letter is a token, greedily by `count` tokens -> the times in
// ms at which each of them was known.
// All times are wall time of the page, so that every runtime is measured alike, with its own overhead.

/** `length` letters; another text for each `number`, so that nobody's prefix cache helps. */
function text(length, number) {
  return Array.from({ length }, (_, i) => String.fromCharCode(97 + ((i * 37 + number * 11) % 26))).join("");
}

const waits = []; // [began, ended] of each wait for the GPU, ms

/** From now on `waits` grows. What a page does for a token outside of them is its own time: at most what it could save. */
function watchWaits() {
  for (const [kind, name] of [
    [globalThis.GPUBuffer, "mapAsync"],
    [globalThis.GPUQueue, "onSubmittedWorkDone"],
  ]) {
    const original = kind?.prototype[name];
    if (!original) continue;
    kind.prototype[name] = async function (...values) {
      const began = performance.now();
      try {
        return await original.apply(this, values);
      } finally {
        waits.push([began, performance.now()]);
      }
    };
  }
}

/** How much of the time from `began` to `ended` no wait covers. */
function outsideWaits(began, ended) {
  let [own, at] = [0, began];
  for (const [from, to] of waits.filter((w) => w[1] > began && w[0] < ended).sort((a, b) => a[0] - b[0])) {
    own += Math.max(0, from - at);
    at = Math.max(at, to);
  }
  return own + Math.max(0, ended - at);
}

const ADAPTER_MS = 30_000; // a GPU process that keeps crashing never answers

async function adapter() {
  const never = new Promise((resolve) => setTimeout(resolve, ADAPTER_MS, null));
  const found = await Promise.race([navigator.gpu?.requestAdapter(), never]);
  if (!found) return null;
  const { vendor, architecture, description } = found.info;
  return { vendor, architecture, description, f16: found.features.has("shader-f16") };
}

async function generated(engine, prompt, count) {
  const times = await engine.generate(prompt, count);
  if (times.length !== count) throw new Error(`${times.length} tokens came, expected ${count}`);
  return times;
}

const ENOUGH_MS = 20_000; // then a slow runtime repeats no more

/** Tokens per second of reading the prompt up to the first token, and of the tokens after it, and own ms for each of those. */
async function speed(engine, { prompt, count, repeats }) {
  await generated(engine, text(prompt, 0), 3); // the first use of a kernel compiles it
  const samples = { prefill: [], decode: [], own_ms: [] };
  const end = performance.now() + ENOUGH_MS;
  for (let i = 1; i === 1 || (i <= repeats && performance.now() < end); ++i) {
    const began = performance.now();
    const times = await generated(engine, text(prompt, i), count + 1);
    samples.prefill.push((1000 * prompt) / (times[0] - began));
    samples.decode.push((1000 * count) / (times[count] - times[0]));
    samples.own_ms.push(outsideWaits(times[0], times[count]) / count);
  }
  return samples;
}

/** Seconds from the start of the navigation. */
async function firstToken(engine, { prompt }) {
  const times = await generated(engine, text(prompt, 0), 1);
  return { first_token: [times[0] / 1000] };
}

try {
  const job = JSON.parse(decodeURIComponent(location.search.slice(1)));
  const runtime = await import(`/runtimes/${job.runtime}.mjs`);
  // where nothing is timed from the start of the page
  const found = job.kind === "first_token" ? undefined : await adapter();
  if (found === null && !runtime.onCpu) throw new Error("no WebGPU adapter");
  watchWaits();
  const engine = await runtime.open(job);
  const samples = await (job.kind === "speed" ? speed : firstToken)(engine, job);
  globalThis.result = { samples, packages: runtime.packages, adapter: found };
} catch (error) {
  globalThis.result = { error: String(error?.stack ?? error) };
}
