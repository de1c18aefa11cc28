// The page with its real engines, on real bundles.
import { ask, assert, button, eventually, faults, newChat, open, pill, requests, send, start, text } from "./helpers.mjs";

/** A profile's page with the likeliest tokens and short answers, so that every run says the same. */
async function greedy(context, url) {
  context.setDefaultTimeout(600_000); // a software adapter compiles the shaders at each load
  const page = await open(context, url);
  await page.evaluate(() => {
    const settings = { sampling: { temperature: 0, maxTokens: 24 } };
    localStorage.setItem(`mlcpipe-chat ${location.pathname}`, JSON.stringify(settings));
  });
  await page.reload();
  await start(page);
  return page;
}

/** Ask for a long answer of unlikely tokens, and stop it. */
async function stopsAnAnswer(page, question) {
  await button(page, "Settings").click();
  await page.getByLabel("Longest answer").fill("1024");
  await page.getByLabel("Temperature").fill("2");
  await page.keyboard.press("Escape");
  await send(page, question);
  await page.waitForFunction(() => document.querySelector(".message.assistant .prose")?.innerText.length > 20);
  await page.keyboard.press("Escape");
  await page.locator(".stats").waitFor();
  await eventually(async () => assert.match(await text(page, ".stats"), /^stopped/));
}

/** Of the engines the server sent this one alone, and it is kept for use without a network. */
async function onlyEngine(page, url, name) {
  const engines = (paths) => [...new Set(paths.flatMap((path) => path.match(/worker-(engine|webllm)(?=-)/)?.[0] ?? []))];
  assert.deepEqual(engines((await requests(url)).map(({ path }) => path)), [name]);
  await page.evaluate(() => navigator.serviceWorker.ready);
  const kept = await page.evaluate(async () => {
    const [cache] = (await caches.keys()).filter((key) => key.startsWith("mlcpipe-page "));
    return (await (await caches.open(cache)).keys()).map(({ url }) => url);
  });
  assert.deepEqual(engines(kept), [name]);
}

export const scenarios = {
  async answers_as_the_python_engine_and_works_offline({ context, url, expected }) {
    const page = await greedy(context, url);
    const shown = expected.answer.replaceAll("`", "");  // Markdown is rendered
    assert.equal(await ask(page, expected.question), shown);
    assert.match(await text(page, ".stats"), new RegExp(`tokens/s · first token .* · ${expected.tokens} tokens$`));
    await button(page, "Regenerate").click();
    await page.waitForFunction(() => document.querySelector(".message.assistant")?.ariaBusy === "true");
    await page.locator(".stats").waitFor();
    assert.equal(await text(page, ".message.assistant .prose"), shown);

    await page.evaluate(() => navigator.serviceWorker.ready);
    await page.waitForFunction(() => navigator.serviceWorker.controller !== null);
    await onlyEngine(page, url, "worker-webllm");
    await context.setOffline(true);
    await faults(url, { dead: true });
    await page.reload();
    await pill(page, "ready");
    await button(page, "New chat").click();
    await page.waitForFunction(() => document.querySelectorAll(".message").length === 0);
    assert.equal(await ask(page, expected.question), shown);
    await context.setOffline(false);

    await newChat(page); // what a user writes is text, also the token that ends a turn
    await ask(page, expected.forged);
    const [, read] = /^Read (\d+) tokens/.exec(await page.locator(".stats").last().getAttribute("title"));
    assert.ok(+read > +expected.control + 4, `${read} tokens, ${expected.control} with control tokens`);
  },

  async pages_are_run_by_the_page_s_own_engine({ context, url, expected }) {
    const page = await greedy(context, url);
    const shown = (answer) => answer.replaceAll("`", ""); // Markdown is rendered
    assert.equal(await ask(page, expected.question), shown(expected.answer));
    assert.match(await text(page, ".stats"), new RegExp(`· ${expected.tokens} tokens$`));
    assert.equal(await ask(page, expected.more), shown(expected.next));

    await newChat(page); // what a user writes is text, also the token that ends a turn
    await ask(page, expected.forged);
    const [, read] = /^Read (\d+) tokens/.exec(await page.locator(".stats").last().getAttribute("title"));
    assert.ok(+read > +expected.control + 4, `${read} tokens, ${expected.control} with control tokens`);
    await newChat(page);
    await stopsAnAnswer(page, expected.question);
    await onlyEngine(page, url, "worker-engine");
  },

  async stops_and_recovers_from_a_lost_gpu({ browser, context, url, question }) {
    const page = await greedy(context, url);
    // Of the two libraries the one for an adapter without shader-f16, and no other was fetched.
    const kept = await page.evaluate(async () => (await (await caches.open("webllm/wasm")).keys()).map(({ url }) => url));
    assert.deepEqual(kept.map((key) => key.split("/").at(-1)), ["model.wasm"]);
    await stopsAnAnswer(page, question);

    // In earnest: the process with the GPU ends.
    await send(page, question);
    const session = await browser.newBrowserCDPSession();
    await session.send("Browser.crashGpuProcess");
    await pill(page, "lost");
    await button(page, "Load the model again").click();
    await pill(page, "ready");
    await ask(page, question);
  },

  async readme_example_runs_in_plain_webllm({ context, url, expected }) {
    const page = await context.newPage();
    await page.goto(new URL("plain.html", url).href);
    await page.waitForFunction(() => document.body.innerText.length > 5, null, { timeout: 600_000 });
    assert.equal((await page.innerText("body")).trim(), expected.answer);
  },

  async answers_keep_to_a_schema({ context, url }) {
    const page = await context.newPage();
    await page.goto(new URL("plain.html", url).href);
    await page.waitForFunction(() => document.body.innerText.length > 5, null, { timeout: 600_000 });
    const { found, free } = JSON.parse(await page.innerText("body"));
    for (const { text: answer, why } of found) {
      assert.equal(why, "stop", answer);
      const { animal, legs, wild, ...rest } = JSON.parse(answer);
      assert.ok(["cat", "dog", "crocodile"].includes(animal), answer);
      assert.deepEqual([legs.map((leg) => typeof leg), typeof wild, rest], [["boolean", "boolean"], "boolean", {}]);
    }
    assert.ok(!free.trimStart().startsWith("{"), free); // the model says something else when it may
  },
};
