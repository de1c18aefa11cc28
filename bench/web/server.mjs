// Serves folders on a free port of 127.0.0.1, as a host does that means it: immutable files, and pages that may use threads.
import fs from "node:fs";
import http from "node:http";
import path from "node:path";

const TYPES = {
  ".html": "text/html",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".json": "application/json",
  ".wasm": "application/wasm",
};
const HEADERS = {
  "Cache-Control": "public, max-age=31536000, immutable",
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Resource-Policy": "same-origin",
};

/** `folders`: {prefix of the path: folder}; the longest prefix that fits counts -> the listening server. */
export async function serve(folders) {
  const prefixes = Object.keys(folders).sort((a, b) => b.length - a.length);
  const server = http.createServer((request, response) => {
    const wanted = decodeURIComponent(new URL(request.url, "http://localhost").pathname); // without ..
    const prefix = prefixes.find((prefix) => wanted.startsWith(prefix));
    const file = path.join(folders[prefix], wanted.slice(prefix.length));
    fs.stat(file, (error, found) => {
      if (error || !found.isFile()) return response.writeHead(404, HEADERS).end();
      const type = TYPES[path.extname(file)] ?? "application/octet-stream";
      response.writeHead(200, { ...HEADERS, "Content-Type": type, "Content-Length": found.size });
      if (request.method === "HEAD") return response.end();
      fs.createReadStream(file).pipe(response);
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return server;
}
