import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { BLIND } from "../app/chats";
import { words } from "../app/model";
import { useStore } from "../app/store";
import { readPictures } from "../chat/pictures";
import { useApp } from "./context";
import { Icon } from "./icons";
import { MessageView } from "./message";
import { ModelCard } from "./model_card";
import { AttachButton, Pictures } from "./pictures";
import { ServerCard } from "./server_card";

const NEAR_END = 80;

/** The messages of the open conversation, and the input for the next one. */
export function ConversationView() {
  const { chats, model, server } = useApp();
  const { running } = useStore(chats.state);
  const { phase, title } = useStore(model.state);
  const chat = chats.current();
  const scroller = useRef<HTMLDivElement>(null);
  const [follow, setFollow] = useState(true);
  const canAsk = phase.name === "ready" && running === null;
  const here = running?.chatId === chat.id ? running : null;

  // Stay at the end while an answer grows, unless the user went up to read. Watched by its size, which changes after
  // it is drawn, too: buttons and figures appear at the end.
  const column = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (!follow) return;
    const toEnd = () => (scroller.current!.scrollTop = scroller.current!.scrollHeight);
    toEnd();
    const watcher = new ResizeObserver(toEnd);
    watcher.observe(column.current!);
    watcher.observe(scroller.current!);
    return () => watcher.disconnect();
  }, [follow, chat.id]);
  useEffect(() => setFollow(true), [chat.id, chat.messages.length]);
  const onScroll = () => {
    const box = scroller.current!;
    setFollow(box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END);
  };

  // The same functions at each frame, so that messages that did not change are not drawn again.
  const editMessage = useCallback((id: string, text: string) => void chats.edit(id, text), [chats]);
  const regenerateMessage = useCallback((id: string) => void chats.regenerate(id), [chats]);
  const showCard = phase.name !== "ready";
  return (
    <>
      <div class="scroller" ref={scroller} onScroll={onScroll}>
        <div class="column" ref={column} role="log" aria-live="off" aria-label={`Conversation: ${chat.title}`}>
          {!server && chat.messages.length === 0 && !showCard && (
            <div class="welcome">
              <h2>{title || "Chat"}</h2>
              <p>Everything stays on this device: the model, your questions and its answers.</p>
            </div>
          )}
          {chat.messages.map((message) => (
            <MessageView
              key={message.id}
              message={message}
              running={here?.messageId === message.id}
              canAsk={canAsk}
              onEdit={editMessage}
              onRegenerate={regenerateMessage}
            />
          ))}
          {server && (showCard || chat.messages.length === 0) && <section class="card" aria-label="Server"><ServerCard server={server} /></section>}
          {!server && showCard && <ModelCard />}
        </div>
      </div>
      {!follow && (
        <button class="to-end" onClick={() => setFollow(true)} aria-label="Scroll to the end">
          <Icon name="down" />
        </button>
      )}
      <Composer key={chat.id} />
    </>
  );
}

function Composer() {
  const { chats, model } = useApp();
  const { running } = useStore(chats.state);
  const { phase, sees } = useStore(model.state);
  const [text, setText] = useState("");
  const [pictures, setPictures] = useState<string[]>([]);
  const [problem, setProblem] = useState("");
  const area = useRef<HTMLTextAreaElement>(null);
  const ready = phase.name === "ready";
  const empty = !text.trim() && pictures.length === 0;

  useEffect(() => {
    if (ready && matchMedia("(hover: hover)").matches && document.activeElement === document.body) area.current?.focus();
  }, [ready]);
  useLayoutEffect(() => {
    // Grows with the text up to the maximum of the style sheet.
    area.current!.style.height = "auto";
    area.current!.style.height = `${area.current!.scrollHeight}px`;
  }, [text]);

  const send = (event: Event) => {
    event.preventDefault();
    if (!ready || running || empty) return;
    void chats.send(text.trim(), pictures);
    setText("");
    setPictures([]);
    setProblem("");
  };
  const attach = async (files: File[]) => {
    if (files.length === 0) return;
    try {
      if (!sees) throw new Error(BLIND);
      const read = await readPictures(files);
      setPictures((before) => [...before, ...read]);
      setProblem("");
    } catch (error) {
      setProblem(words(error));
    }
  };
  const dropped = (event: DragEvent) => {
    const files = [...(event.dataTransfer?.files ?? [])];
    if (files.length === 0) return;
    event.preventDefault();
    void attach(files);
  };
  return (
    <form class="composer" onSubmit={send} onDragOver={(e) => e.preventDefault()} onDrop={dropped}>
      {problem && <p class="notice bad" role="alert"><Icon name="warn" /> {problem}</p>}
      <Pictures urls={pictures} onRemove={(at) => setPictures(pictures.filter((_, index) => index !== at))} />
      {sees && <AttachButton onFiles={(files) => void attach(files)} />}
      <textarea
        ref={area}
        id="question"
        rows={1}
        aria-label="Message"
        placeholder={ready ? "Ask something" : "The model is not ready yet"}
        value={text}
        onInput={(e) => setText(e.currentTarget.value)}
        onPaste={(e) => {
          const files = [...(e.clipboardData?.files ?? [])];
          if (files.length > 0) e.preventDefault();
          void attach(files);
        }}
        onKeyDown={(e) => {
          if (e.key === "Enter" && !e.shiftKey && !e.isComposing) send(e);
        }}
      />
      {running ? (
        <button type="button" class="round" onClick={() => chats.stop()} disabled={running.stopping} aria-label="Stop the answer" title="Stop (Esc)">
          <Icon name="stop" />
        </button>
      ) : (
        <button type="submit" class="round" disabled={!ready || empty} aria-label="Send" title="Send (Enter)">
          <Icon name="send" />
        </button>
      )}
    </form>
  );
}
