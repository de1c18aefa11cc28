// The page at `/` of `mlcpipe serve`: the real server, the real page.
import { ask, assert, button, eventually, pill, text } from "./helpers.mjs";

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
    assert.match(await text(page, ".stats"), /tokens\/s · first token \d+ m?s · \d+ tokens/);
    await button(page, "New chat").click();
    await eventually(async () => assert.match(await text(page, ".facts"), /[1-9]\d* tokens so far/));
    assert.equal(await page.evaluate(() => navigator.serviceWorker.getRegistration()), undefined);
    assert.deepEqual(foreign, []);
    assert.deepEqual(log.filter((line) => !line.includes("401")), []);
    await page.reload();
    await pill(page, "ready");
  },
};
