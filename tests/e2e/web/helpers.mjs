// What scenarios share: the page's parts by what a user sees of them.
import assert from "node:assert/strict";

export { assert };

export const pill = (page, phase) => page.waitForSelector(`.pill[data-phase="${phase}"]`);

/** Open the page; `script` is what the scripted engine reads. */
export async function open(context, url, script = {}) {
  const page = await context.newPage();
  await page.addInitScript((value) => (globalThis.scripted ??= value), script);
  await page.goto(url);
  return page;
}

export async function openReady(context, url, script = {}) {
  const page = await open(context, url, script);
  await start(page);
  return page;
}

/** Download if the page offers it, and wait until the model is ready. */
export async function start(page) {
  await page.waitForSelector('.pill:is([data-phase="offer"], [data-phase="ready"])');
  const button = page.getByRole("button", { name: /^Download .* and start/ });
  if (await button.count()) await button.click();
  await pill(page, "ready");
}

export async function send(page, text) {
  await page.fill("#question", text);
  await page.keyboard.press("Enter");
}

/** Ask and wait for the end of the answer -> its text. */
export async function ask(page, question) {
  await send(page, question);
  await page.waitForFunction((wanted) => {
    const [asked, answer] = [...document.querySelectorAll(".message")].slice(-2);
    return asked?.innerText.startsWith(wanted) && answer?.querySelector(".stats");
  }, question);
  return page.locator(".message.assistant .prose").last().innerText();
}

/** Start another conversation, and wait until the page shows it. */
export async function newChat(page) {
  await button(page, "New chat").click();
  await page.waitForFunction(() => document.querySelectorAll(".message").length === 0);
}

/** Tell the server what to do wrong from now on. */
export async function faults(url, value) {
  const response = await fetch(new URL("/faults", url), { method: "POST", body: JSON.stringify(value) });
  assert.equal(response.status, 200);
}

/** The requests that the server saw: [{path, range}]. */
export async function requests(url) {
  return (await fetch(new URL("/requests", url))).json();
}

export const button = (page, name) => page.getByRole("button", { name });
export const text = (page, selector) => page.locator(selector).innerText();

/** Try until the assertions hold: the page draws a frame later than it knows. */
export async function eventually(check, timeout = 10_000) {
  for (const end = Date.now() + timeout; ; ) {
    try {
      return await check();
    } catch (error) {
      if (Date.now() > end) throw error;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  }
}
