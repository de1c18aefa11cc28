/** A Cache API in memory, as far as the page uses it. */

class MemoryCache {
  readonly entries = new Map<string, { body: Blob; headers: Headers }>();
  /** Bytes that may be stored in all; more is refused as a browser does. */
  constructor(private readonly room: { bytes: number }) {}

  async match(request: RequestInfo | URL): Promise<Response | undefined> {
    const entry = this.entries.get(key(request));
    return entry && new Response(entry.body, { headers: entry.headers });
  }

  async put(request: RequestInfo | URL, response: Response): Promise<void> {
    const body = await response.blob();
    if (body.size > this.room.bytes) throw new DOMException("Quota exceeded.", "QuotaExceededError");
    this.room.bytes -= body.size;
    this.entries.set(key(request), { body, headers: response.headers });
  }

  async delete(request: RequestInfo | URL): Promise<boolean> {
    this.room.bytes += this.entries.get(key(request))?.body.size ?? 0;
    return this.entries.delete(key(request));
  }

  async keys(): Promise<Request[]> {
    return [...this.entries.keys()].map((url) => new Request(url));
  }
}

export class MemoryCaches {
  readonly caches = new Map<string, MemoryCache>();
  readonly room = { bytes: Infinity };

  async open(name: string): Promise<MemoryCache> {
    if (!this.caches.has(name)) this.caches.set(name, new MemoryCache(this.room));
    return this.caches.get(name)!;
  }

  async has(name: string): Promise<boolean> {
    return this.caches.has(name);
  }

  /** URLs of all entries of a cache. */
  urls(name: string): string[] {
    return [...(this.caches.get(name)?.entries.keys() ?? [])];
  }

  asStorage(): CacheStorage {
    return this as unknown as CacheStorage;
  }
}

function key(request: RequestInfo | URL): string {
  return request instanceof Request ? request.url : String(request);
}
