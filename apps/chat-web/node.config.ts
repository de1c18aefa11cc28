/** The engine of pages alone, for Node, where tests/webgpu runs it: `npm run build:node`. */

import { defineConfig } from "vite";

export default defineConfig({
  publicDir: false,
  build: {
    ssr: "src/engine/pages/engine.ts",
    outDir: "dist-node",
    rollupOptions: { external: ["@mlc-ai/web-runtime"], output: { format: "cjs", entryFileNames: "engine.cjs" } },
  },
  ssr: { noExternal: ["@huggingface/jinja", "@huggingface/tokenizers", "@noble/hashes"] },
});
