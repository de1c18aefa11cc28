// WGSL to SPIR-V by naga: a list of sources on standard input, a list of modules in base64 on standard output.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const packages = createRequire(pathToFileURL(process.argv[2] + "/"));
const { translate } = await import(pathToFileURL(packages.resolve("naga-wasm")));
const sources = JSON.parse(readFileSync(0, "utf8"));
const modules = sources.map((source) => {
  const words = translate({ from: "wgsl", source, to: "spirv" });
  return Buffer.from(words.buffer, words.byteOffset, words.byteLength).toString("base64");
});
process.stdout.write(JSON.stringify(modules));
