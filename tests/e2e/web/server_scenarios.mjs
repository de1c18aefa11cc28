// The page at `/` of `mlcpipe serve`: the real server, the real page.
import { ask, assert, button, eventually, newChat, pill, text } from "./helpers.mjs";

const PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const picture = { name: "dot.png", mimeType: "image/png", buffer: Buffer.from(PNG, "base64") };

/** Of two models the second, which is loaded for the question; it sees nothing, and the page says so. */
async function chooses_a_model_and_shows_pictures(page) {
  await newChat(page);
  await page.selectOption(".top select", "two");
  await eventually(async () => assert.equal(await text(page, ".card h2"), "two"));
  assert.match(await text(page, ".card"), /loaded with the first question/);
  assert.match(await ask(page, "Hello"), /\S/);
  await eventually(async () => assert.equal(await page.locator(".top select option:checked").textContent(), "two"));
  const drop = (name, type) =>
    page.evaluate(([at, mime]) => {
      const data = new DataTransfer();
      data.items.add(new File(["x"], at, { type: mime }));
      document.querySelector(".composer").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }, [name, type]);
  await drop("a.png", "image/png");
  await eventually(async () => assert.match(await text(page, ".composer .notice"), /sees no pictures/));
  assert.equal(await button(page, "Attach a picture").count(), 0);
  // Told that it sees, the page shows and sends what is attached; the server refuses it in words.
  await page.route(/status/, async (route) => {
    const response = await route.fetch();
    await route.fulfill({ response, json: { ...(await response.json()), sees: true } });
  });
  await button(page, "Attach a picture").waitFor();
  await drop("a.txt", "text/plain");
  await eventually(async () => assert.match(await text(page, ".composer .notice"), /a\.txt is no JPEG/));
  await page.setInputFiles('input[type="file"]', [picture, picture]);
  await eventually(async () => assert.equal(await page.locator(".composer img").count(), 2));
  await button(page, "Remove picture 2").click();
  const sent = page.waitForRequest(/chat\/completions/);
  await button(page, "Send").click();
  const { model, messages } = (await sent).postDataJSON();
  assert.equal(model, "two");
  assert.deepEqual(messages.at(-1).content, [{ type: "image_url", image_url: { url: `data:image/png;base64,${PNG}` } }]);
  await eventually(async () => assert.match(await text(page, ".message.assistant:last-of-type .notice"), /the model sees no pictures/));
  assert.equal(await page.locator(".message.user img").count(), 1);
}

export const scenarios = {
  async asks_for_the_key_shows_figures_and_chats({ context, url, log }) {
    const page = await context.newPage();
    const foreign = [];
    context.on("request", (request) => request.url().startsWith(url) || foreign.push(request.url()));
    await page.goto(url);
    await pill(page, "key");
    await page.fill('input[type="password"]', "wrong");
    await button(page, "Use it").click();
    await page.getByRole("alert").waitFor();
    await page.fill('input[type="password"]', "secret");
    await button(page, "Use it").click();
    await pill(page, "ready");
    assert.match(await text(page, ".card pre"), /^curl http:\/\/127.+Authorization: Bearer YOUR_KEY.+"Hello"/s);
    assert.match(await ask(page, "Hello"), /\S/);
    assert.match(await text(page, ".stats"), /tokens\/s · first token [\d.]+ m?s · \d+ tokens/);
    await button(page, "New chat").click();
    await eventually(async () => assert.match(await text(page, ".facts"), /[1-9]\d* tokens so far/));
    assert.equal(await page.evaluate(() => navigator.serviceWorker.getRegistration()), undefined);
    assert.deepEqual(foreign, []);
    assert.deepEqual(log.filter((line) => !line.includes("401")), []);
    await page.reload();
    await pill(page, "ready");
    await chooses_a_model_and_shows_pictures(page);
  },
};
