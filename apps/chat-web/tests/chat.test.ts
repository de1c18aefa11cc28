import "fake-indexeddb/auto";
import { describe, expect, it } from "vitest";
import { ask, edit, message, newConversation, prompt, regenerate, replaceMessage, titleOf, toMarkdown } from "../src/chat/conversation";
import { ChatDatabase } from "../src/chat/database";
import { readPictures } from "../src/chat/pictures";

const q = (id: string, text = id) => message(id, "user", text);
const a = (id: string, text = "") => message(id, "assistant", text);

function twoTurns() {
  let chat = ask(newConversation("c", 1, "Be brief."), q("q1", "first question"), a("a1", "one"), 2);
  chat = ask(chat, q("q2"), a("a2", "two"), 3);
  return chat;
}

describe("a conversation", () => {
  it("is named by its first question, once", () => {
    expect(twoTurns().title).toBe("first question");
    expect(ask({ ...newConversation("c", 1, ""), title: "Mine", named: true }, q("q1"), a("a1"), 2).title).toBe("Mine");
    expect(titleOf("  \n ")).toBe("New chat");
    expect(titleOf("word ".repeat(30))).toBe("word word word word word word word word word…");
  });

  it("gives the engine all but the answer to come", () => {
    expect(prompt(twoTurns())).toEqual([
      { role: "system", content: "Be brief." },
      { role: "user", content: "first question" },
      { role: "assistant", content: "one" },
      { role: "user", content: "q2" },
    ]);
  });

  it("keeps pictures with their question", () => {
    const shown = message("q1", "user", "What?", ["data:image/png;base64,AAAA"]);
    const chat = ask(newConversation("c", 1, ""), shown, a("a1"), 2);
    expect(prompt(ask(replaceMessage(chat, a("a1", "A cat."), 3), q("q2"), a("a2"), 4))[0]).toEqual({ role: "user", content: "What?", pictures: shown.pictures });
    expect(toMarkdown(chat)).toContain("**You**\n\n*(pictures: 1)*\n\nWhat?");
  });

  it("reads files that are pictures, and says what is none", async () => {
    const bytes = Uint8Array.from({ length: 20_000 }, (_, i) => i);
    const [url] = await readPictures([new File([bytes], "a.png", { type: "image/png" })]);
    expect(url).toBe(`data:image/png;base64,${Buffer.from(bytes).toString("base64")}`);
    await expect(readPictures([new File(["<svg/>"], "a.svg", { type: "image/svg+xml" })])).rejects.toThrow("a.svg is no JPEG");
    await expect(readPictures([new File([new Uint8Array(17 << 20)], "b.png", { type: "image/png" })])).rejects.toThrow("more than 16 MiB");
  });

  it("leaves out what got no answer", () => {
    let chat = ask(newConversation("c", 1, ""), q("too long"), a("a1"), 2);
    chat = ask(chat, q("q2"), a("a2"), 3);
    expect(prompt(chat)).toEqual([{ role: "user", content: "q2" }]);
  });

  it("drops what follows a question that changed or an answer that is made again", () => {
    expect(edit(twoTurns(), "q1", q("q3"), a("a3"), 4).messages.map((m) => m.id)).toEqual(["q3", "a3"]);
    expect(edit(twoTurns(), "q2", q("q3"), a("a3"), 4).messages.map((m) => m.id)).toEqual(["q1", "a1", "q3", "a3"]);
    expect(regenerate(twoTurns(), "a1", a("a3"), 4).messages.map((m) => m.id)).toEqual(["q1", "a3"]);
    expect(edit(twoTurns(), "a1", q("q3"), a("a3"), 4)).toEqual(twoTurns());
    expect(regenerate(twoTurns(), "q1", a("a3"), 4)).toEqual(twoTurns());
  });

  it("can be saved as Markdown", () => {
    expect(toMarkdown(twoTurns())).toBe(
      "# first question\n\n> Be brief.\n\n**You**\n\nfirst question\n\n**Model**\n\none\n\n**You**\n\nq2\n\n**Model**\n\ntwo\n");
  });
});

describe("the database", () => {
  it("loses nothing when two tabs change a conversation at once", async () => {
    const [one, two] = [await ChatDatabase.open("t1"), await ChatDatabase.open("t1")];
    await one.add(twoTurns());
    await Promise.all([
      one.update("c", (chat) => replaceMessage(chat, a("a2", "changed"), 5)),
      two.update("c", (chat) => ({ ...chat, title: "renamed" })),
    ]);
    const [chat] = await one.all();
    expect([chat!.title, chat!.messages[3]!.content]).toEqual(["renamed", "changed"]);
  });

  it("does not bring back what was deleted, and lists the latest first", async () => {
    const db = await ChatDatabase.open("t2");
    await db.add(newConversation("old", 1, ""));
    await db.add(newConversation("new", 2, ""));
    expect((await db.all()).map(({ id }) => id)).toEqual(["new", "old"]);
    await db.remove("old");
    expect(await db.update("old", (chat) => chat)).toBeNull();
    expect((await db.all()).map(({ id }) => id)).toEqual(["new"]);
    await db.clear();
    expect(await db.all()).toEqual([]);
  });
});
