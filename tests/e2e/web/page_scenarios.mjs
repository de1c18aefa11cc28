// The page with the scripted engine: everything but the model itself.
import { ask, assert, button, eventually, faults, newChat, open, openReady, pill, requests, send, start, text } from "./helpers.mjs";

const SHARD = "params_shard_0.bin";
const userTexts = (page) => page.locator(".message.user .bubble").allInnerTexts();
const answers = (page) => page.locator(".message.assistant .prose").allInnerTexts();

export const scenarios = {
  async streams_markdown({ context, url }) {
    const page = await openReady(context, url);
    await ask(page, "How is a bundle made?");
    assert.equal(await page.locator(".prose h2").innerText(), "How a bundle is made");
    assert.equal(await page.locator(".prose ol li").count(), 3);
    assert.equal(await page.locator(".prose table td").count(), 6);
    await eventually(async () => assert.equal(await page.locator(".prose .code .bar span").innerText(), "python"));
    const stats = await text(page, ".stats");
    assert.match(stats, /41\.7 tokens\/s · first token \d+ ms · \d+ tokens/);
    await eventually(async () => assert.equal(await page.locator(".prose .hljs-keyword").first().innerText(), "import"));
    // The end is in sight, with what was added to it last.
    await eventually(async () => {
      const left = await page.locator(".scroller").evaluate((box) => box.scrollHeight - box.scrollTop - box.clientHeight);
      assert.ok(left < 2, `${left} px below`);
    });
    await context.grantPermissions(["clipboard-read", "clipboard-write"]);
    await button(page, "Copy code").click();
    await button(page, "Copied").waitFor();
    assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^import mlcpipe\n/);
    await eventually(async () => assert.equal(await text(page, "h1"), "How is a bundle made?"));
  },

  async hostile_output_does_nothing({ context, url }) {
    const page = await openReady(context, url);
    const asked = [];
    context.on("request", (request) => asked.push(request.url()));
    await ask(page, "hostile");
    assert.equal(await page.evaluate(() => globalThis.hacked), undefined);
    const banned = "script, img, iframe, form, svg:not(.icon), style, object, [onerror], [onload], [style], [id]";
    assert.equal(await page.locator(".prose").locator(banned).count(), 0);
    const links = await page.locator(".prose a[href]").evaluateAll((all) => all.map((a) => [a.href, a.rel, a.target]));
    assert.deepEqual(links, [["https://example.org/a", "noopener noreferrer nofollow", "_blank"]]);
    assert.match(await text(page, ".prose"), /<script>window\.hacked = 1<\/script>/);
    assert.deepEqual(asked.filter((u) => !u.startsWith(url)), []);
    assert.equal(await page.locator(".prose input[type=checkbox][disabled]").count(), 1);
  },

  async stop_keeps_what_there_is({ context, url }) {
    const page = await openReady(context, url, { tokenMs: 20 });
    await send(page, "Count to a thousand");
    await page.waitForFunction(() => /\b5\b/.test(document.querySelector(".message.assistant")?.innerText));
    await page.keyboard.press("Escape");
    await page.locator(".stats").waitFor();
    assert.match(await text(page, ".stats"), /^stopped/);
    const kept = await text(page, ".message.assistant .prose");
    assert.match(kept, /^1 2 3 4 5/);
    assert.doesNotMatch(kept, /1000/);
    assert.equal(await ask(page, "again"), "You said: again (2)");
  },

  async regenerate_replaces_the_answer({ context, url }) {
    const page = await openReady(context, url);
    assert.equal(await ask(page, "first"), "You said: first (1)");
    assert.equal(await ask(page, "second"), "You said: second (2)");
    await button(page, "Regenerate").first().click();
    await page.waitForFunction(() => document.querySelector(".prose")?.innerText === "You said: first (3)");
    // What came after it was about the old answer.
    await eventually(async () => assert.deepEqual(await userTexts(page), ["first"]));
  },

  async edit_replaces_what_follows({ context, url }) {
    const page = await openReady(context, url);
    await ask(page, "first");
    await ask(page, "second");
    await page.locator(".message.user").first().hover();
    await button(page, "Edit").first().click();
    const field = page.getByLabel("Edit your message");
    await eventually(async () => assert.equal(await field.evaluate((area) => area === document.activeElement), true));
    await field.fill("other");
    await button(page, "Ask again").click();
    await page.waitForFunction(() => document.querySelector(".prose")?.innerText === "You said: other (3)");
    await eventually(async () => assert.deepEqual(await userTexts(page), ["other"]));
    const sent = await page.evaluate(() => globalThis.scripted.chats.at(-1).messages);
    assert.deepEqual(sent, [{ role: "user", content: "other" }]);
  },

  async conversations_are_kept({ context, url }) {
    const page = await openReady(context, url);
    await ask(page, "about apples");
    await newChat(page);
    await ask(page, "about pears");
    await page.reload();
    await pill(page, "ready");
    await eventually(async () => assert.deepEqual(await page.locator(".entry").allInnerTexts(), ["about pears", "about apples"]));
    await eventually(async () => assert.deepEqual(await userTexts(page), ["about pears"]));
    await page.getByRole("button", { name: "about apples", exact: true }).click();
    await page.getByText("You said: about apples (1)").waitFor();
    assert.equal((await answers(page)).length, 1);
    await button(page, "Rename about apples").click();
    await page.getByLabel("Name of the conversation").fill("Fruit");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("h1").innerText === "Fruit");
    await button(page, "Delete Fruit").click();
    await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
    await page.waitForFunction(() => document.querySelectorAll(".entry").length === 1);
    await page.reload();
    await eventually(async () => assert.deepEqual(await page.locator(".entry").allInnerTexts(), ["about pears"]));
  },

  async system_prompt_and_sampling_reach_the_engine({ context, url }) {
    const page = await openReady(context, url);
    await button(page, "Settings").click();
    await page.getByLabel("System prompt").fill("Be brief.");
    await page.getByLabel("Temperature").fill("0");
    await page.getByLabel("Seed").fill("7");
    await page.keyboard.press("Escape");
    await ask(page, "hello");
    const last = () => page.evaluate(() => globalThis.scripted.chats.at(-1));
    const { messages, sampling } = await last();
    assert.deepEqual(messages, [{ role: "system", content: "Be brief." }, { role: "user", content: "hello" }]);
    assert.equal(sampling.temperature, 0);
    assert.equal(sampling.seed, 7);
    await page.reload();
    await pill(page, "ready");
    await newChat(page);
    await ask(page, "again");
    assert.equal((await last()).sampling.temperature, 0);
    assert.equal((await last()).messages[0].content, "Be brief.");
  },

  async context_overflow_is_explained({ context, url }) {
    const page = await openReady(context, url);
    await send(page, "overflow");
    assert.match(await text(page, ".message .notice"), /longer than the 4096 tokens/);
    assert.equal(await ask(page, "hello"), "You said: hello (2)");
    const sent = await page.evaluate(() => globalThis.scripted.chats.at(-1).messages);
    assert.deepEqual(sent, [{ role: "user", content: "hello" }]);
  },

  async works_offline_after_the_first_load({ context, url }) {
    const page = await openReady(context, url);
    await page.evaluate(() => navigator.serviceWorker.ready);
    await page.waitForFunction(() => navigator.serviceWorker.controller !== null);
    await context.setOffline(true);
    await faults(url, { dead: true });
    await page.reload();
    await pill(page, "ready");
    assert.equal(await ask(page, "offline?"), "You said: offline? (1)");
    await context.setOffline(false);
  },

  async broken_download_resumes({ context, url }) {
    // Slowly: what lies unread in the browser when a connection breaks is lost.
    await faults(url, { breakAfter: { [SHARD]: 300_000 }, slow: { [SHARD]: 40 }, times: 100 });
    const page = await open(context, url);
    await button(page, /^Download/).click();
    await page.getByText("The connection broke").waitFor();
    await button(page, "Pause").click();
    await pill(page, "broken");
    assert.match(await text(page, ".card"), /The download is paused/);
    await page.reload();
    await pill(page, "offer");
    const left = await text(page, ".card .primary");
    await faults(url, {});
    await button(page, /^Download/).click();
    await pill(page, "ready");
    const seen = (await requests(url)).filter(({ path }) => path.endsWith(SHARD));
    const offset = Number(/bytes=(\d+)-/.exec(seen.at(-1).range)[1]);
    assert.ok(offset >= 128 << 10, `resumed at ${offset}; ${left}`);
    assert.equal(await ask(page, "hello"), "You said: hello (1)");
  },

  async server_without_ranges_still_works({ context, url }) {
    await faults(url, { breakAfter: { [SHARD]: 300_000 }, times: 1, noRanges: true });
    const page = await openReady(context, url);
    assert.equal(await ask(page, "hello"), "You said: hello (1)");
  },

  async dead_connection_gives_up_in_words_and_resumes({ context, url }) {
    await faults(url, { status: { [SHARD]: 503 } });
    const page = await open(context, url);
    await page.clock.install();
    await button(page, /^Download/).click();
    for (let i = 0; i < 40 && !(await page.locator('.pill[data-phase="broken"]').count()); i++) {
      await page.clock.runFor(2000);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    await pill(page, "broken");
    assert.match(await text(page, ".card"), /The download was interrupted[^]*the server answers 503[^]*stay here/);
    await faults(url, {});
    await button(page, "Resume").click();
    await page.clock.resume();
    await pill(page, "ready");
  },

  async missing_file_is_named({ context, url }) {
    await faults(url, { status: { [SHARD]: 404 } });
    const page = await open(context, url);
    await button(page, /^Download/).click();
    await pill(page, "broken");
    assert.match(await text(page, ".card"), /params_shard_0\.bin cannot be fetched: the server answers 404/);
  },

  async flipped_byte_is_refused({ context, url }) {
    await faults(url, { flip: { [SHARD]: 123_456 } });
    const page = await open(context, url);
    await button(page, /^Download/).click();
    await pill(page, "broken");
    assert.match(await text(page, ".card"), /A file was refused[^]*params_shard_0\.bin is not the file that was published[^]*SHA-256/);
    assert.equal(await page.evaluate(() => globalThis.scripted.loads.length), 0);
    // Nothing of it stays: the right file is fetched from its first byte.
    await faults(url, {});
    await button(page, "Fetch it again").click();
    await pill(page, "ready");
    assert.equal((await requests(url)).filter(({ path }) => path.endsWith(SHARD)).at(-1).range, null);
  },

  async damaged_once_on_the_way_is_fetched_again({ context, url }) {
    await faults(url, { flip: { [SHARD]: 123_456 }, times: 1 });
    await openReady(context, url);
  },

  async stored_files_can_be_checked({ context, url }) {
    const page = await openReady(context, url);
    await button(page, "Settings").click();
    await button(page, "Check the files").click();
    await page.getByText("All 5 files are as published.").waitFor();
    await page.evaluate(async (name) => {
      const cache = await caches.open("webllm/model");
      const key = (await cache.keys()).find((request) => request.url.endsWith(name));
      const old = await cache.match(key);
      const bytes = new Uint8Array(await old.arrayBuffer());
      bytes[1000] ^= 1;
      await cache.put(key, new Response(bytes, { headers: old.headers }));
    }, SHARD);
    await button(page, "Check the files").click();
    await page.getByText("Damaged and removed: params_shard_0.bin").waitFor();
    await page.keyboard.press("Escape");
    await button(page, /^Download .* and start/).waitFor();
  },

  async quota_is_refused_before_the_download({ context, url }) {
    const page = await context.newPage();
    // Chromium 140 and later tell every site of 10 GiB; other browsers tell the truth.
    await page.addInitScript(() => {
      StorageManager.prototype.estimate = async () => ({ usage: 50_000_000, quota: globalThis.roomy ? 90_000_000 : 50_400_000 });
    });
    await page.goto(url);
    await pill(page, "offer");
    assert.match(await text(page, ".card"), /Not enough room in the browser[^]*need 1\.\d MB more; the browser lets this site store 400 kB more/);
    assert.equal(await button(page, /^Download/).count(), 0);
    await page.evaluate(() => (globalThis.roomy = true));
    await button(page, "Check again").click();
    await button(page, /^Download/).waitFor();
    await start(page);
  },

  async full_storage_in_the_middle_is_explained({ context, url }) {
    const page = await open(context, url);
    const session = await context.newCDPSession(page);
    const quota = (quotaSize) => session.send("Storage.overrideQuotaForOrigin", { origin: new URL(url).origin, quotaSize });
    await pill(page, "offer");
    await quota(1_000_000);
    await button(page, /^Download/).click();
    await pill(page, "broken");
    assert.match(await text(page, ".card"), /The browser's storage is full[^]*stay here/);
    await quota(400_000_000);
    await button(page, "Resume").click();
    await pill(page, "ready");
  },

  async small_gpu_is_refused_in_words({ context, url }) {
    const page = await open(context, url, { adapter: { maxBufferSize: 2 ** 28, maxStorageBufferBindingSize: 2 ** 24 } });
    await pill(page, "offer");
    assert.match(await text(page, ".card"), /This GPU cannot run the model[^]*Scripted GPU offers buffers of 16\.8 MB/);
    assert.equal(await button(page, /^Download|anyway/).count(), 0);
  },

  async little_memory_is_refused_in_words_but_may_be_tried({ context, url }) {
    const page = await context.newPage();
    await page.addInitScript(() => Object.defineProperty(navigator, "deviceMemory", { value: 0.25 }));
    await faults(url, { weightsBytes: 900_000_000 });
    await page.goto(url);
    await pill(page, "offer");
    assert.match(await text(page, ".card"), /The model probably does not fit[^]*needs about 9\d\d MB of GPU memory/);
    await button(page, "Try anyway").click();
    await pill(page, "ready");
  },

  async no_webgpu_is_explained({ context, url }) {
    const page = await open(context, url, { adapter: null });
    await pill(page, "unsupported");
    assert.match(await text(page, ".card"), /This browser cannot run the model[^]*no WebGPU/);
  },

  async a_library_for_every_gpu_is_chosen({ context, url }) {
    const libraries = async () => (await requests(url)).map(({ path }) => path.split("/").at(-1)).filter((name) => /wasm$/.test(name));
    const page = await openReady(context, url, { adapter: { features: [] } });
    assert.equal(await page.evaluate(() => globalThis.scripted.loads[0].library.size), 60_000);
    assert.deepEqual(await libraries(), ["model.wasm"]);
    const other = await openReady(await context.browser().newContext(), url);
    assert.equal(await other.evaluate(() => globalThis.scripted.loads[0].library.size), 50_000);
    assert.deepEqual(await libraries(), ["model.wasm", "model-f16.wasm"]);
    await other.context().close();
  },

  async lost_gpu_is_recovered_with_one_click({ context, url }) {
    const page = await openReady(context, url, { tokenMs: 20 });
    await send(page, "Count to a thousand");
    await page.waitForFunction(() => /\b5\b/.test(document.querySelector(".message.assistant")?.innerText));
    await page.evaluate(() => globalThis.scripted.lose("driver reset"));
    await pill(page, "lost");
    assert.match(await text(page, ".card"), /The GPU was lost[^]*Your conversation is kept[^]*driver reset/);
    await eventually(async () => assert.match(await text(page, ".message .notice"), /lost before the answer was complete/));
    await button(page, "Load the model again").click();
    await pill(page, "ready");
    assert.equal(await page.evaluate(() => globalThis.scripted.loads.length), 2);
    await button(page, "Regenerate").click();
    await page.waitForFunction(() => /\b5\b/.test(document.querySelector(".message.assistant")?.innerText));
  },

  async failed_load_is_explained({ context, url }) {
    const page = await open(context, url, { loadError: "shader module 3 is invalid" });
    await button(page, /^Download/).click();
    await pill(page, "failed");
    assert.match(await text(page, ".card"), /could not load the model: shader module 3 is invalid/);
    await page.evaluate(() => delete globalThis.scripted.loadError);
    await button(page, "Try again").click();
    await pill(page, "ready");
  },

  async two_tabs_share_the_model_and_the_conversations({ context, url }) {
    const one = await openReady(context, url);
    await ask(one, "from the first tab");
    const two = await open(context, url);
    await pill(two, "elsewhere");
    await eventually(async () => assert.deepEqual(await userTexts(two), ["from the first tab"]));
    await button(two, "Use it here").click();
    await pill(two, "ready");
    await pill(one, "elsewhere");
    await ask(two, "from the second tab");
    await one.waitForFunction(() => document.querySelectorAll(".message.user").length === 2);
    // Closed, it gives the model back.
    await two.close();
    await pill(one, "ready");
    assert.match(await ask(one, "back"), /^You said: back/);
  },

  async two_tabs_download_once({ context, url }) {
    await faults(url, { slow: { [SHARD]: 40 } });
    const one = await open(context, url);
    const two = await open(context, url);
    await pill(two, "offer");
    await button(one, /^Download/).click();
    await pill(two, "downloading");
    await one.waitForSelector('.pill:is([data-phase="ready"], [data-phase="elsewhere"])');
    await two.waitForSelector('.pill:is([data-phase="ready"], [data-phase="elsewhere"])');
    const seen = (await requests(url)).filter(({ path }) => path.endsWith(SHARD));
    assert.equal(seen.length, 1);
  },

  async new_model_replaces_the_old_and_keeps_what_is_the_same({ context, url }) {
    const page = await openReady(context, url);
    await faults(url, { newLibrary: true });
    await page.reload();
    await pill(page, "offer");
    await start(page);
    const names = await page.evaluate(async () => (await (await caches.open("webllm/wasm")).keys()).length);
    assert.equal(names, 1);
    assert.equal((await requests(url)).filter(({ path }) => path.endsWith(SHARD)).length, 1);
  },

  async keyboard_alone_is_enough({ context, url }) {
    const page = await open(context, url);
    await pill(page, "offer");
    await page.keyboard.press("Tab");
    assert.equal(await page.evaluate(() => document.activeElement.innerText), "Go to the message field");
    for (let i = 0; i < 8; i++) {
      if (await page.evaluate(() => /^Download/.test(document.activeElement.innerText.trim()))) break;
      await page.keyboard.press("Tab");
    }
    await page.keyboard.press("Enter");
    await pill(page, "ready");
    await page.focus("#question");
    await page.keyboard.type("line one");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("line two");
    await page.keyboard.press("Enter");
    await page.locator(".stats").waitFor();
    await eventually(async () => assert.deepEqual(await userTexts(page), ["line one\nline two"]));
    await page.keyboard.press("Control+Shift+O");
    await eventually(async () => assert.equal(await page.locator(".message").count(), 0));
    const outline = await page.evaluate(() => getComputedStyle(document.querySelector("#question").form).borderColor);
    assert.notEqual(outline, "");
  },

  async screen_reader_hears_states_and_answers({ context, url }) {
    const page = await openReady(context, url);
    await ask(page, "hello");
    await eventually(async () => {
      const live = await page.locator('p[aria-live="polite"]').allInnerTexts();
      assert.deepEqual(live.map((t) => t.trim()), ["The model answered: You said: hello (1)", "Model: ready"]);
    });
    // Every control has a name, and the page its landmarks.
    const nameless = await page.locator("button, input, textarea, select, progress").evaluateAll((all) =>
      all.filter((e) => !(e.ariaLabel || e.innerText?.trim() || e.labels?.length || e.title)).map((e) => e.outerHTML));
    assert.deepEqual(nameless, []);
    for (const role of ["navigation", "main", "log", "heading"]) assert.ok(await page.getByRole(role).count(), role);
  },

  async nothing_is_wider_than_a_phone({ context, url }) {
    const page = await openReady(context, url);
    await page.setViewportSize({ width: 360, height: 740 });
    await ask(page, "Write a long line");
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 360);
    await button(page, "Conversations").click();
    await button(page, "New chat").click();
    await page.waitForFunction(() => document.querySelectorAll(".message").length === 0);
    await eventually(async () => assert.equal(await page.locator(".sidebar.open").count(), 0));
  },

  async colours_follow_the_system_and_the_user({ context, url }) {
    const page = await openReady(context, url);
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await ground();
    await page.emulateMedia({ colorScheme: "dark" });
    const dark = await ground();
    assert.notEqual(light, dark);
    await button(page, "Settings").click();
    await page.getByRole("radio", { name: "Light" }).check();
    await page.waitForFunction((colour) => getComputedStyle(document.body).backgroundColor === colour, light);
    // Text stands out enough (WCAG 2.2, 1.4.3: 4.5 to 1) in both.
    for (const theme of ["light", "dark"]) {
      const bad = await page.evaluate(contrasts, theme);
      assert.deepEqual(bad, [], theme);
    }
  },
};

function contrasts(theme) {
  document.documentElement.dataset.theme = theme;
  const probe = document.body.appendChild(document.createElement("i"));
  const rgb = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map((v) => v / 255);
  };
  const light = (name) => {
    const [r, g, b] = rgb(name).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const pairs = [
    ["--text", "--ground"], ["--text", "--surface"], ["--text", "--raised"], ["--text", "--accent-soft"], ["--text", "--bad-soft"],
    ["--text", "--warm-soft"], ["--muted", "--ground"], ["--muted", "--surface"], ["--muted", "--raised"],
    ["--code-word", "--surface"], ["--code-text", "--surface"],
    ["--code-number", "--surface"], ["--code-name", "--surface"], ["--muted", "--surface"], ["--accent-text", "--accent"], ["--accent", "--ground"], ["--surface", "--bad"],
  ]; // prettier-ignore
  return pairs.filter(([a, b]) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05) < 4.5;
  });
}
