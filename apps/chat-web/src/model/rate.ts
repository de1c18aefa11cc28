/** Bytes a second over the last moments, for a time left that neither jumps nor lags. */

const WINDOW_MS = 6000;

export class Rate {
  private samples: { at: number; done: number }[] = [];

  add(at: number, done: number): void {
    const last = this.samples.at(-1);
    // Backwards: a refused file starts over, so earlier measurements are void.
    if (last && done < last.done) this.samples = [];
    this.samples.push({ at, done });
    while (this.samples.length > 2 && this.samples[1]!.at <= at - WINDOW_MS) this.samples.shift();
  }

  /** Bytes per second; null before there is enough to tell. */
  perSecond(): number | null {
    const first = this.samples[0];
    const last = this.samples.at(-1);
    if (!first || !last || last.at - first.at < 500) return null;
    return ((last.done - first.done) / (last.at - first.at)) * 1000;
  }

  /** Seconds until `total`; null before there is enough to tell. */
  left(total: number): number | null {
    const rate = this.perSecond();
    const last = this.samples.at(-1);
    return rate && last && rate > 0 ? (total - last.done) / rate : null;
  }
}
