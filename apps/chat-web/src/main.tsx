import { render } from "preact";
import { ChatsController } from "./app/chats";
import { ModelController } from "./app/model";
import { ServerModel } from "./app/server";
import { openSettings } from "./app/settings";
import { ChatDatabase } from "./chat/database";
import { provider } from "./engine/in_worker";
import { Page } from "./ui/app";
import { AppContext } from "./ui/context";
import "./styles.css";

async function main(): Promise<void> {
  // `mlcpipe serve` says so in the page that it sends.
  const served = "server" in document.documentElement.dataset;
  // Browsers lend the GPU, the caches and more only to pages that nobody on the way can change.
  if (!isSecureContext && !served) throw new Error("it must be opened over https, or from this computer.");
  // Several sites may share an origin: everything that is kept carries the page's folder in its name.
  const base = new URL(".", location.href).href;
  const scope = new URL(base).pathname;
  if (!served && import.meta.env.PROD && "serviceWorker" in navigator) void navigator.serviceWorker.register("sw.js");
  const settings = openSettings(`mlcpipe-chat ${scope}`, localStorage);
  const server = served ? new ServerModel(base, sessionStorage) : null;
  const browser = served ? null : new ModelController(provider, settings, base);
  const model = (server ?? browser)!;
  const chats = new ChatsController(await ChatDatabase.open(`mlcpipe-chat ${scope}`), model, settings, `mlcpipe-chat ${scope}`);
  await chats.start();
  const root = document.getElementById("app")!;
  root.replaceChildren();
  render(<AppContext.Provider value={{ model, browser, server, chats, settings }}><Page /></AppContext.Provider>, root);
  await model.start();
}

void main().catch((error: unknown) => {
  // Before anything could be shown: private windows without storage, for one.
  const text = document.createElement("p");
  text.className = "fatal";
  text.setAttribute("role", "alert");
  text.textContent = `The page could not start: ${error instanceof Error ? error.message : String(error)}`;
  document.getElementById("app")!.replaceChildren(text);
});
