// One browser for all scenarios: reads {"id", "url", "name"} by lines, runs the scenario in a fresh profile, answers by lines.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import path from "node:path";

const [page, chromiumPath] = process.argv.slice(2);
const require = createRequire(pathToFileURL(path.join(page, "package.json")));
const { chromium } = require("playwright-core");
const ARGUMENTS = [
  "--headless=new",
  "--no-sandbox",
  "--enable-unsafe-webgpu",
  "--use-webgpu-adapter=swiftshader",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const browser = await chromium.launch({ executablePath: chromiumPath, headless: true, args: ARGUMENTS });

async function run({ name, file, url, more }) {
  const { scenarios } = await import(pathToFileURL(file).href);
  const context = await browser.newContext({ viewport: { width: 1180, height: 800 }, reducedMotion: "reduce" });
  const log = [];
  context.on("console", (message) => log.push(`${message.type()}: ${message.text()}`));
  context.on("weberror", (error) => log.push(`uncaught: ${error.error().stack}`));
  context.setDefaultTimeout(30_000);
  try {
    await scenarios[name]({ ...more, browser, context, url, log });
    return { ok: true };
  } catch (error) {
    const texts = await Promise.all(context.pages().map((p) => p.innerText("#app").catch(() => "")));
    return { ok: false, error: error.stack, log, page: texts.join("\n----\n").slice(0, 2000) };
  } finally {
    await context.close();
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const answer = await run(JSON.parse(line));
  process.stdout.write(JSON.stringify(answer) + "\n");
}
await browser.close();
