/** Conversations in IndexedDB. Each change reads and writes in one transaction, so that two tabs never lose a turn. */

import type { Conversation } from "./conversation";

const STORE = "conversations";

export class ChatDatabase {
  private constructor(private readonly db: IDBDatabase) {}

  /** @param name one database for each site: several may share an origin */
  static open(name: string): Promise<ChatDatabase> {
    return new Promise((resolve, reject) => {
      const request = indexedDB.open(name, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        // Another tab with a later version of the page may need to change the schema.
        request.result.onversionchange = () => request.result.close();
        resolve(new ChatDatabase(request.result));
      };
    });
  }

  /** All conversations, the latest first. */
  async all(): Promise<Conversation[]> {
    const conversations = await this.run<Conversation[]>("readonly", (store) => store.getAll());
    return conversations.sort((a, b) => b.updated - a.updated);
  }

  async add(chat: Conversation): Promise<void> {
    await this.run("readwrite", (store) => store.put(chat));
  }

  /** Change a stored conversation -> the new state; null if it was deleted meanwhile, and stays so. */
  update(id: string, change: (chat: Conversation) => Conversation): Promise<Conversation | null> {
    return new Promise((resolve, reject) => {
      const transaction = this.db.transaction(STORE, "readwrite");
      const store = transaction.objectStore(STORE);
      let result: Conversation | null = null;
      const read = store.get(id) as IDBRequest<Conversation | undefined>;
      read.onsuccess = () => {
        if (read.result) store.put((result = change(read.result)));
      };
      transaction.oncomplete = () => resolve(result);
      transaction.onabort = () => reject(transaction.error);
    });
  }

  async remove(id: string): Promise<void> {
    await this.run("readwrite", (store) => store.delete(id));
  }

  async clear(): Promise<void> {
    await this.run("readwrite", (store) => store.clear());
  }

  private run<T>(mode: IDBTransactionMode, action: (store: IDBObjectStore) => IDBRequest): Promise<T> {
    return new Promise((resolve, reject) => {
      const transaction = this.db.transaction(STORE, mode);
      const request = action(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request.result as T);
      transaction.onabort = () => reject(transaction.error);
    });
  }
}
