import { useRef, useState } from "preact/hooks";
import { toMarkdown, type Conversation } from "../chat/conversation";
import { useStore } from "../app/store";
import { useApp } from "./context";
import { Icon } from "./icons";

interface Props {
  open: boolean;
  onClose(): void;
  onSettings(): void;
}

/** All conversations. On a phone it slides over the page. */
export function Sidebar({ open, onClose, onSettings }: Props) {
  const { chats } = useApp();
  const { list, currentId } = useStore(chats.state);
  const pick = (action: () => void) => () => {
    action();
    onClose();
  };
  return (
    <>
      <nav id="sidebar" class={open ? "sidebar open" : "sidebar"} aria-label="Conversations" onKeyDown={(e) => e.key === "Escape" && onClose()}>
        <div class="row spread">
          <button class="primary wide" onClick={pick(() => chats.startNew())}><Icon name="plus" /> New chat</button>
          <button class="square narrow-only" onClick={onClose} aria-label="Close the list"><Icon name="close" /></button>
        </div>
        {list.length === 0 && <p class="hint">Your conversations will be here. They are kept in this browser only.</p>}
        <ul>
          {list.map((chat) => (
            <Entry key={chat.id} chat={chat} current={chat.id === currentId} onOpen={pick(() => chats.open(chat.id))} />
          ))}
        </ul>
        <button class="plain wide foot" onClick={pick(onSettings)}><Icon name="gear" /> Settings</button>
      </nav>
      {open && <div class="veil narrow-only" onClick={onClose} />}
    </>
  );
}

function Entry({ chat, current, onOpen }: { chat: Conversation; current: boolean; onOpen(): void }) {
  const { chats } = useApp();
  const [title, setTitle] = useState<string | null>(null);
  const dialog = useRef<HTMLDialogElement>(null);
  const rename = () => {
    if (title !== null) void chats.rename(chat.id, title);
    setTitle(null);
  };
  if (title !== null) {
    return (
      <li>
        <input
          aria-label="Name of the conversation"
          value={title}
          ref={(input) => input?.focus()}
          onInput={(e) => setTitle(e.currentTarget.value)}
          onBlur={rename}
          onKeyDown={(e) => {
            if (e.key === "Enter") rename();
            if (e.key === "Escape") setTitle(null);
            e.stopPropagation();
          }}
        />
      </li>
    );
  }
  return (
    <li class={current ? "current" : ""}>
      <button class="entry" aria-current={current ? "page" : undefined} onClick={onOpen} title={chat.title}>{chat.title}</button>
      <button class="square small" aria-label={`Rename ${chat.title}`} onClick={() => setTitle(chat.title)}><Icon name="pencil" /></button>
      <button class="square small" aria-label={`Save ${chat.title} as a file`} onClick={() => save(chat)}><Icon name="download" /></button>
      <button class="square small" aria-label={`Delete ${chat.title}`} onClick={() => dialog.current!.showModal()}><Icon name="trash" /></button>
      <dialog ref={dialog} class="ask" aria-label="Delete the conversation">
        <p>Delete “{chat.title}”? It is kept nowhere else.</p>
        <form method="dialog" class="row end">
          <button class="plain">Keep</button>
          <button class="danger" onClick={() => void chats.remove(chat.id)}>Delete</button>
        </form>
      </dialog>
    </li>
  );
}

function save(chat: Conversation): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([toMarkdown(chat)], { type: "text/markdown" }));
  link.download = `${chat.title.replace(/[^\p{L}\p{N} _-]/gu, "").trim() || "chat"}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
