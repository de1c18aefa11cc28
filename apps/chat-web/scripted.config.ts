/** The page with the scripted engine instead of WebLLM, for tests/e2e/web: `vite build --config scripted.config.ts`. */

import { fileURLToPath } from "node:url";
import { mergeConfig } from "vite";
import page from "./vite.config";

export default mergeConfig(page, {
  resolve: { alias: [{ find: /^\.\/engine\/in_worker$/, replacement: fileURLToPath(new URL("tests/scripted/provider.ts", import.meta.url)) }] },
  build: { outDir: "dist-test" },
});
