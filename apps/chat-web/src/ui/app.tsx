import { useEffect, useState } from "preact/hooks";
import type { Phase } from "../app/model";
import { useStore } from "../app/store";
import { useApp } from "./context";
import { ConversationView } from "./conversation";
import { Icon } from "./icons";
import { ModelChoice } from "./server_card";
import { SettingsDialog } from "./settings";
import { Sidebar } from "./sidebar";

export function Page() {
  const { chats, model, server, settings } = useApp();
  const { announcement } = useStore(chats.state);
  const { phase, title } = useStore(model.state);
  const { theme } = useStore(settings);
  const [listOpen, setListOpen] = useState(false);
  const [settingsOpen, setSettingsOpen] = useState(false);
  const chat = chats.current();

  useEffect(() => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }, [theme]);
  useEffect(() => {
    document.title = `${chat.title} · ${title || "Chat"}`;
  }, [chat.title, title]);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) chats.stop();
      if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
        event.preventDefault();
        chats.startNew();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [chats]);

  return (
    <>
      <a class="skip" href="#question">Go to the message field</a>
      <Sidebar open={listOpen} onClose={() => setListOpen(false)} onSettings={() => setSettingsOpen(true)} />
      <main>
        <header class="top">
          <button class="square narrow-only" aria-label="Conversations" aria-expanded={listOpen} aria-controls="sidebar" onClick={() => setListOpen(true)}>
            <Icon name="menu" />
          </button>
          <h1>{chat.title}</h1>
          {server && <ModelChoice server={server} />}
          <button class="pill" data-phase={phase.name} onClick={() => setSettingsOpen(true)} title="The model and this device">
            <span class="dot" /> {STATUS[phase.name]}
          </button>
        </header>
        <ConversationView />
      </main>
      <SettingsDialog open={settingsOpen} onClose={() => setSettingsOpen(false)} />
      <p class="visually-hidden" role="status" aria-live="polite">{announcement}</p>
      <p class="visually-hidden" role="status" aria-live="polite">Model: {STATUS[phase.name]}</p>
    </>
  );
}

const STATUS: Record<Phase["name"], string> = {
  starting: "starting",
  unsupported: "not supported",
  offer: "not loaded",
  downloading: "downloading",
  broken: "download stopped",
  loading: "loading",
  ready: "ready",
  lost: "GPU lost",
  elsewhere: "in another tab",
  failed: "failed",
  key: "needs a key",
};
