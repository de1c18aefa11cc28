/** A value that components watch. */

import { useEffect, useState } from "preact/hooks";

export class Store<T> {
  private readonly watchers = new Set<() => void>();

  constructor(private value: T) {}

  get(): T {
    return this.value;
  }

  set(value: T): void {
    if (Object.is(value, this.value)) return;
    this.value = value;
    for (const watcher of [...this.watchers]) watcher();
  }

  patch(part: Partial<T>): void {
    this.set({ ...this.value, ...part });
  }

  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }
}

/** The store's value in a component; drawn at most once a frame, however often it changes. */
export function useStore<T>(store: Store<T>): T {
  const [value, setValue] = useState(store.get());
  useEffect(() => {
    let frame = 0;
    const update = () => {
      frame = 0;
      setValue(() => store.get());
    };
    // A hidden page draws no frames, and has nobody to draw them for.
    const changed = () => {
      frame ||= requestAnimationFrame(update);
    };
    const unwatch = store.watch(changed);
    update();
    return () => {
      unwatch();
      cancelAnimationFrame(frame);
    };
  }, [store]);
  return value;
}
