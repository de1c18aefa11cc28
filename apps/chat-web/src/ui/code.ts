/** Code blocks of an answer: a frame with the language, colours, and a button that copies. */

type Highlight = typeof import("../chat/highlight").highlight;

let highlight: Highlight | null = null;
let loading: Promise<void> | null = null;

/** Dress the code blocks of an answer; one that still grows gets its button at the end. */
export function decorateAll(root: HTMLElement, running: boolean): void {
  for (const block of root.querySelectorAll("pre")) {
    const bar = frame(block);
    if (!running && !bar.querySelector("button")) bar.append(copyButton(block));
    colour(block);
  }
}

/** The bar over the block, made if it has none. */
function frame(block: HTMLPreElement): HTMLElement {
  const parent = block.parentElement!;
  if (parent.classList.contains("code")) return parent.firstElementChild as HTMLElement;
  const box = document.createElement("div");
  const bar = document.createElement("div");
  const name = document.createElement("span");
  box.className = "code";
  bar.className = "bar";
  name.textContent = languageOf(block) || "text";
  bar.append(name);
  // A wide block scrolls: it must be reachable by keyboard.
  block.tabIndex = 0;
  block.replaceWith(box);
  box.append(bar, block);
  return bar;
}

function copyButton(block: HTMLPreElement): HTMLButtonElement {
  const button = document.createElement("button");
  button.className = "action";
  button.textContent = "Copy code";
  button.onclick = async () => {
    button.textContent = (await copy(block.innerText)) ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy code"), 1500);
  };
  return button;
}

function colour(block: HTMLPreElement): void {
  const code = block.querySelector("code");
  if (!code || !languageOf(block) || code.dataset.coloured) return;
  if (!highlight) {
    // It takes a moment once; a block that is gone by then does no harm. Without it code is as readable, in one colour.
    loading ??= import("../chat/highlight").then((module) => void (highlight = module.highlight)).catch(() => undefined);
    void loading.then(() => highlight && block.isConnected && colour(block));
    return;
  }
  const html = highlight(code.textContent, languageOf(block));
  code.dataset.coloured = "1";
  if (html !== null) code.innerHTML = html;
}

function languageOf(block: HTMLPreElement): string {
  return block.querySelector("code")?.className.replace("language-", "") ?? "";
}

/** -> whether the browser let us. */
export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch (error) {
    if (error instanceof DOMException || error instanceof TypeError) return false; // not allowed, or not over http
    throw error;
  }
}
