// Measures one runtime in one Chromium: a job as JSON in the first argument, the result as a line of JSON on stdout.
//
// {"runtime": a module of runtimes/, "model": folder, "kind": "speed" or "first_token", "prompt": n, "count": n,
//  "repeats": n, "threads": n, "options": of the runtime, "chromium": path, "adapter": "swiftshader" or "default",
//  "headed": bool, "timeout_s": n}
// -> {"samples": {...} (see page.mjs), "adapter", "versions", "browser", "cpu_s": CPU seconds of the browser's processes}
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";
import { serve } from "./server.mjs";

const HERE = path.dirname(fileURLToPath(import.meta.url));
const job = JSON.parse(process.argv[2]);
const QUIET = [
  "--no-sandbox",
  "--no-first-run",
  "--disable-quic",
  "--disable-sync",
  "--disable-breakpad",
  "--disable-component-update",
  "--disable-background-networking",
  "--enable-unsafe-webgpu",
];
// For GPUs of Linux machines without a screen; macOS and Windows need nothing. Without a GPU Chromium takes SwiftShader.
const LINUX_GPU = ["--ignore-gpu-blocklist", "--enable-features=Vulkan", "--disable-vulkan-surface"];
const adapter = { swiftshader: ["--use-webgpu-adapter=swiftshader"], default: os.platform() === "linux" ? LINUX_GPU : [] };

/** CPU seconds that the processes below `root` have used; 0 where there is no /proc. */
function treeSeconds(root) {
  if (os.platform() !== "linux") return 0;
  const used = new Map();
  const children = new Map();
  for (const pid of fs.readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    try {
      const text = fs.readFileSync(`/proc/${pid}/stat`, "latin1");
      const fields = text.slice(text.lastIndexOf(")") + 2).split(" "); // proc(5), from the third field on: state, ppid
      const times = fields.slice(11, 15).map(Number); // utime, stime, and those of children that ended
      used.set(+pid, times.reduce((total, ticks) => total + ticks, 0));
      children.set(+fields[1], [...(children.get(+fields[1]) ?? []), +pid]);
    } catch {
      continue; // it ended meanwhile
    }
  }
  const sum = (pid) => (children.get(pid) ?? []).reduce((total, child) => total + used.get(child) + sum(child), 0);
  return sum(root) / +execFileSync("getconf", ["CLK_TCK"]);
}

function ownSeconds() {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

/** CPU seconds that all other processes of this machine have used since it started. */
function othersSeconds() {
  const all = os.cpus().map(({ times }) => times.user + times.nice + times.sys + times.irq);
  return all.reduce((total, milliseconds) => total + milliseconds, 0) / 1000 - ownSeconds();
}

let cpuSeconds = 0;
let browser = "";

/** One visit in a fresh browser process with this profile -> what the page measured. */
async function visit(profile, url) {
  const args = [...QUIET, ...adapter[job.adapter], ...(job.headed ? [] : ["--headless=new"])];
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: job.chromium,
    headless: !job.headed,
    args,
  });
  try {
    browser = context.browser()?.version() ?? "";
    const page = context.pages()[0] ?? (await context.newPage());
    const log = [];
    page.on("console", (message) => log.push(message.text()));
    page.on("pageerror", (error) => log.push(error.message));
    await page.goto(url);
    await page.waitForFunction("globalThis.result", null, { timeout: 1000 * job.timeout_s, polling: 100 }).catch((error) => {
      throw new Error(`${error.message.split("\n")[0]} The page said: ${log.slice(-5).join(" | ").slice(0, 1000)}`);
    });
    const result = await page.evaluate("globalThis.result");
    if (result.error) throw new Error(result.error.split("\n").slice(0, 3).join(" ").slice(0, 1000));
    return result;
  } finally {
    cpuSeconds += treeSeconds(process.pid);
    const before = othersSeconds();
    await context.close(); // what is used in these tenths of a second is the browser's work: nobody waits for its processes
    cpuSeconds += othersSeconds() - before;
  }
}

const server = await serve({ "/": HERE, "/model/resolve/main/": job.model });
const profile = fs.mkdtempSync(path.join(os.tmpdir(), "bench-web-"));
const { prompt, count, repeats, threads, kind, options, runtime } = job;
const query = (kind) => encodeURIComponent(JSON.stringify({ runtime, kind, prompt, count, repeats, threads, options }));
const url = (kind) => `http://127.0.0.1:${server.address().port}/page.html?${query(kind)}`;
try {
  const first = await visit(profile, url(kind === "first_token" ? "fill" : kind));
  const results = kind === "first_token" ? [] : [first];
  for (let i = 0; kind === "first_token" && i < repeats; ++i) results.push(await visit(profile, url(kind)));
  const samples = {};
  for (const result of results) {
    for (const [name, values] of Object.entries(result.samples)) (samples[name] ??= []).push(...values);
  }
  const version = (name) => JSON.parse(fs.readFileSync(path.join(HERE, "node_modules", name, "package.json"))).version;
  const versions = Object.fromEntries(first.packages.map((name) => [name, version(name)]));
  console.log(JSON.stringify({ samples, adapter: first.adapter, versions, browser, cpu_s: cpuSeconds + ownSeconds() }));
} catch (error) {
  console.error(`${runtime}: ${error.message}`.replaceAll("\n", " "));
  process.exitCode = 1;
} finally {
  server.closeAllConnections();
  server.close();
  fs.rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
}
