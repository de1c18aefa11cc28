/**
 * Keeps the page itself, so that it opens without a network. The model's files are in the engine's caches.
 *
 * The page is cached under the name of its build, with the engines that the site's bundles need, and another one when it
 * is first used; a new build waits until the last tab with the old one closes.
 */

declare const self: ServiceWorkerGlobalScope;
/** Paths of the built page and of its engines, and a hash of them: put in by the build. */
declare const __PRECACHE__: string[];
declare const __ENGINES__: string[];
declare const __BUILD__: string;

const PREFIX = `mlcpipe-page ${new URL(self.registration.scope).pathname} `;
const PAGE = PREFIX + __BUILD__;
const FACTS = `mlcpipe-facts ${new URL(self.registration.scope).pathname}`;
const SLOW_MS = 4000;

self.addEventListener("install", (event) => {
  event.waitUntil(Promise.all([keepPage(__PRECACHE__), keepFacts().then(keepPage)]));
});

async function keepPage(paths: string[]): Promise<void> {
  // Names in assets/ carry a hash: the browser's cached copy will do.
  const requests = paths.map((path) => new Request(path, { cache: path.startsWith("assets/") ? "default" : "reload" }));
  await (await caches.open(PAGE)).addAll(requests);
}

/** Files that the page read before this worker was active -> the paths of the engines that they ask for. */
async function keepFacts(): Promise<string[]> {
  const cache = await caches.open(FACTS);
  await cache.add("site.json");
  const site = (await (await cache.match("site.json"))!.json()) as { choices: { path: string }[] };
  // A bundle with several libraries is named for each; `addAll` refuses duplicates.
  const paths = [...new Set(site.choices.map(({ path }) => `${path.replace(/\/?$/, "/")}mlcpipe.json`))];
  await cache.addAll(paths);
  const manifests = await Promise.all(paths.map(async (path) => (await (await cache.match(path))!.json()) as { model?: { kv_cache?: string } }));
  const names = manifests.map(({ model }) => (model?.kv_cache === "pages" ? "worker-engine-" : "worker-webllm-"));
  return __ENGINES__.filter((path) => names.some((name) => path.includes(name)));
}

self.addEventListener("activate", (event) => {
  const clean = async (): Promise<void> => {
    for (const name of await caches.keys()) if (name.startsWith(PREFIX) && name !== PAGE) await caches.delete(name);
    await self.clients.claim();
  };
  event.waitUntil(clean());
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const url = new URL(request.url);
  if (request.method !== "GET" || !url.href.startsWith(self.registration.scope)) return;
  const path = url.href.slice(self.registration.scope.length).split(/[?#]/)[0]!;
  if (path === "site.json" || path.endsWith("/mlcpipe.json")) event.respondWith(freshest(request));
  else if (request.mode === "navigate" && (path === "" || path === "index.html")) event.respondWith(cached("index.html", request));
  else if (__PRECACHE__.includes(path) || __ENGINES__.includes(path)) event.respondWith(cached(path, request));
});

async function cached(path: string, request: Request): Promise<Response> {
  const cache = await caches.open(PAGE);
  const kept = await cache.match(path);
  if (kept) return kept;
  const response = await fetch(request);
  if (response.ok && __ENGINES__.includes(path)) await cache.put(path, response.clone()).catch(() => undefined); // a full disk
  return response;
}

/** From the network, so that a new model is seen; offline the last copy. */
async function freshest(request: Request): Promise<Response> {
  const cache = await caches.open(FACTS);
  const old = await cache.match(request.url);
  const network = fetch(request).then(async (response) => {
    if (response.ok) await cache.put(request.url, response.clone());
    return response;
  });
  if (!old) return network;
  const slow = new Promise<Response>((resolve) => setTimeout(() => resolve(old), SLOW_MS));
  return Promise.race([network.then((response) => (response.ok ? response : old)).catch(() => old), slow]);
}

export {};
