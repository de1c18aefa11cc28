/** SHA-256 by parts (FIPS 180-4): `crypto.subtle` takes only a whole file at once, and shards can be large. */

const K = new Uint32Array(64);
const H0 = new Uint32Array(8);

// The constants are fractions of roots of the first primes (FIPS 180-4, 4.2.2 and 5.3.3).
for (let candidate = 2, found = 0; found < 64; candidate++) {
  let prime = true;
  for (let d = 2; d * d <= candidate; d++) if (candidate % d === 0) prime = false;
  if (!prime) continue;
  if (found < 8) H0[found] = Math.floor(fraction(Math.sqrt(candidate)) * 2 ** 32);
  K[found++] = Math.floor(fraction(Math.cbrt(candidate)) * 2 ** 32);
}

function fraction(x: number): number {
  return x - Math.floor(x);
}

export class Sha256 {
  private readonly state = H0.slice();
  private readonly words = new Int32Array(64);
  private readonly block = new Uint8Array(64);
  private filled = 0;
  private total = 0;

  update(bytes: Uint8Array): this {
    this.total += bytes.length;
    let at = 0;
    if (this.filled > 0) {
      at = Math.min(64 - this.filled, bytes.length);
      this.block.set(bytes.subarray(0, at), this.filled);
      this.filled += at;
      if (this.filled < 64) return this;
      this.compress(this.block, 0);
      this.filled = 0;
    }
    for (; at + 64 <= bytes.length; at += 64) this.compress(bytes, at);
    this.block.set(bytes.subarray(at));
    this.filled = bytes.length - at;
    return this;
  }

  /** The digest in hexadecimal; nothing may be added afterwards. */
  hex(): string {
    const bits = this.total * 8;
    const pad = new Uint8Array((this.filled < 56 ? 64 : 128) - this.filled);
    pad[0] = 0x80;
    const view = new DataView(pad.buffer);
    view.setUint32(pad.length - 8, Math.floor(bits / 2 ** 32));
    view.setUint32(pad.length - 4, bits >>> 0);
    this.update(pad);
    return Array.from(this.state, (word) => word.toString(16).padStart(8, "0")).join("");
  }

  private compress(data: Uint8Array, at: number): void {
    const w = this.words;
    for (let i = 0; i < 16; i++, at += 4) {
      w[i] = (data[at]! << 24) | (data[at + 1]! << 16) | (data[at + 2]! << 8) | data[at + 3]!;
    }
    for (let i = 16; i < 64; i++) {
      const x = w[i - 15]!;
      const y = w[i - 2]!;
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (w[i - 16]! + s0 + w[i - 7]! + s1) | 0;
    }
    const state = this.state;
    let a = state[0]! | 0, b = state[1]! | 0, c = state[2]! | 0, d = state[3]! | 0;
    let e = state[4]! | 0, f = state[5]! | 0, g = state[6]! | 0, h = state[7]! | 0;
    for (let i = 0; i < 64; i++) {
      const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + K[i]! + w[i]!) | 0;
      const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + t1) | 0;
      d = c; c = b; b = a; a = (t1 + t2) | 0;
    }
    state[0]! += a; state[1]! += b; state[2]! += c; state[3]! += d;
    state[4]! += e; state[5]! += f; state[6]! += g; state[7]! += h;
  }
}
