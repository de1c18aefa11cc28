/** Pictures that a user shows, as data: URLs: they are kept with the conversation, and sent with each question. */

const TYPES = ["image/jpeg", "image/png", "image/webp", "image/gif"];
export const ACCEPTED = TYPES.join(",");
const MAX_BYTES = 16 * 2 ** 20;

/** Read files. Throws an Error, whose message is for the user, for one that is no picture or too large. */
export async function readPictures(files: readonly File[]): Promise<string[]> {
  return Promise.all(files.map(read));
}

async function read(file: File): Promise<string> {
  if (!TYPES.includes(file.type)) throw new Error(`${file.name} is no JPEG, PNG, WebP or GIF.`);
  if (file.size > MAX_BYTES) throw new Error(`${file.name} has more than 16 MiB. Make it smaller.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const parts: string[] = [];
  for (let at = 0; at < bytes.length; at += 8192) parts.push(String.fromCharCode(...bytes.subarray(at, at + 8192)));
  return `data:${file.type};base64,${btoa(parts.join(""))}`;
}
