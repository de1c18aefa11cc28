import { createHash } from "node:crypto";
import { appendFileSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build, defineConfig, type Plugin } from "vite";

/** Where Vite lists the licences of what is bundled, as they ask; it leaves out what a worker brings. */
const LICENSES = "licenses.md";
const IN_WORKER = {
  "@mlc-ai/web-llm": "LICENSE",
  loglevel: "LICENSE-MIT",
  "@mlc-ai/web-runtime": "LICENSE",
  "@huggingface/jinja": "LICENSE",
  "@huggingface/tokenizers": "LICENSE",
};

/** Engines that a page may never need: the service worker keeps those that the bundles of its site are for. */
const ENGINE = /^assets\/worker-(engine|webllm)-/;

/** Builds `sw.js` last, with the list of all files of the page in it: only then are their names known. */
function serviceWorker(): Plugin {
  let outDir = "dist";
  return {
    name: "service-worker",
    apply: "build",
    configResolved(config) {
      outDir = join(config.root, config.build.outDir);
    },
    async closeBundle() {
      for (const [name, file] of Object.entries(IN_WORKER)) {
        appendFileSync(join(outDir, LICENSES), `\n## ${name}\n\n${readFileSync(join("node_modules", name, file), "utf8")}`);
      }
      const files = readdirSync(outDir, { recursive: true, withFileTypes: true })
        .filter((entry) => entry.isFile() && entry.name !== "sw.js")
        .map((entry) => join(entry.parentPath, entry.name).slice(outDir.length + 1).replaceAll("\\", "/"))
        .sort();
      const hash = createHash("sha256");
      for (const file of files) hash.update(file).update(readFileSync(join(outDir, file)));
      const result = await build({
        configFile: false,
        logLevel: "warn",
        define: {
          __PRECACHE__: JSON.stringify(files.filter((file) => !ENGINE.test(file))),
          __ENGINES__: JSON.stringify(files.filter((file) => ENGINE.test(file))),
          __BUILD__: JSON.stringify(hash.digest("hex").slice(0, 12)),
        },
        build: { write: false, lib: { entry: "src/sw.ts", formats: ["iife"], name: "sw" } },
      });
      const output = (Array.isArray(result) ? result[0]! : result) as { output: { type: string; code?: string }[] };
      writeFileSync(join(outDir, "sw.js"), output.output[0]!.code!);
    },
  };
}

export default defineConfig({
  // Relative: the site may lie in any folder of a host.
  base: "./",
  plugins: [serviceWorker()],
  worker: {
    format: "es",
    // `ws` is what tvmjs takes for web sockets where there are none.
    rolldownOptions: { external: ["ws"], output: { chunkFileNames: "assets/worker-[name]-[hash].js" } },
  },
  build: {
    target: "es2022",
    // WebLLM with its tokenizer and grammar engine is one chunk of the worker, and large.
    chunkSizeWarningLimit: 8000,
    modulePreload: false,
    license: { fileName: LICENSES },
  },
});
