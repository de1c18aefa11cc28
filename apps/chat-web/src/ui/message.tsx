import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { AnswerStats, Message } from "../chat/conversation";
import { renderMarkdown } from "../chat/markdown";
import { milliseconds } from "../model/format";
import { copy, decorateAll } from "./code";
import { Icon, type IconName } from "./icons";
import { Pictures } from "./pictures";

interface Props {
  message: Message;
  running: boolean;
  /** Whether the engine could answer now. */
  canAsk: boolean;
  onEdit(id: string, text: string): void;
  onRegenerate(id: string): void;
}

export const MessageView = memo(function MessageView(props: Props) {
  return props.message.role === "user" ? <Question {...props} /> : <Answer {...props} />;
});

function Question({ message, canAsk, onEdit }: Props) {
  const [text, setText] = useState<string | null>(null);
  const button = useRef<HTMLButtonElement>(null);
  const area = useRef<HTMLTextAreaElement>(null);
  const editing = text !== null;
  useEffect(() => {
    if (editing) area.current?.focus();
  }, [editing]);
  const close = () => {
    setText(null);
    requestAnimationFrame(() => button.current?.focus());
  };
  const submit = (event: Event) => {
    event.preventDefault();
    if (!text?.trim()) return;
    onEdit(message.id, text.trim());
    setText(null);
  };
  if (text !== null) {
    return (
      <article class="message user editing" aria-label="You, editing">
        <form onSubmit={submit}>
          <textarea
            aria-label="Edit your message"
            rows={Math.min(12, text.split("\n").length + 1)}
            value={text}
            ref={area}
            onInput={(e) => setText(e.currentTarget.value)}
            onKeyDown={(e) => {
              if (e.key === "Escape") close();
              if (e.key === "Enter" && !e.shiftKey && !e.isComposing) submit(e);
            }}
          />
          <p class="hint">What came after this message is replaced.</p>
          <div class="row end">
            <button type="button" class="plain" onClick={close}>Cancel</button>
            <button type="submit" class="primary" disabled={!text.trim() || !canAsk}>Ask again</button>
          </div>
        </form>
      </article>
    );
  }
  return (
    <article class="message user" aria-label="You">
      <Pictures urls={message.pictures ?? []} />
      {message.content && <div class="bubble">{message.content}</div>}
      <div class="actions">
        <CopyButton text={message.content} />
        <button ref={button} class="action" disabled={!canAsk} onClick={() => setText(message.content)}>
          <Icon name="pencil" /> Edit
        </button>
      </div>
    </article>
  );
}

function Answer({ message, running, canAsk, onRegenerate }: Props) {
  const waiting = running && message.content === "";
  const cut = !running && message.stats === null && message.error === null;
  return (
    <article class="message assistant" aria-label="Model" aria-busy={running}>
      {waiting ? <Thinking /> : <Prose text={message.content} running={running} />}
      {message.error && <p class="notice bad"><Icon name="warn" /> {message.error}</p>}
      {cut && <p class="notice"><Icon name="warn" /> This answer was cut off when the page was closed.</p>}
      {!running && (
        <div class="actions">
          {message.content && <CopyButton text={message.content} />}
          <button class="action" disabled={!canAsk} onClick={() => onRegenerate(message.id)}>
            <Icon name="redo" /> Regenerate
          </button>
          {message.stats && <Stats stats={message.stats} />}
        </div>
      )}
    </article>
  );
}

function Thinking() {
  return (
    <p class="thinking" role="status">
      <span /><span /><span />
      <span class="visually-hidden">The model is reading</span>
    </p>
  );
}

function Prose({ text, running }: { text: string; running: boolean }) {
  const html = useMemo(() => renderMarkdown(text), [text]);
  const root = useRef<HTMLDivElement>(null);
  // Before it is painted, so that a block looks the same while it grows and when it is complete.
  useLayoutEffect(() => decorateAll(root.current!, running), [html, running]);
  return <div ref={root} class={running ? "prose running" : "prose"} dangerouslySetInnerHTML={{ __html: html }} />;
}

function Stats({ stats }: { stats: AnswerStats }) {
  const parts = [
    stats.reason === "interrupted" ? "stopped" : stats.reason === "length" ? "longest answer reached" : null,
    stats.decodeTokensPerSecond && `${stats.decodeTokensPerSecond.toFixed(1)} tokens/s`,
    stats.firstTokenMs !== null && `first token ${milliseconds(stats.firstTokenMs)}`,
    `${stats.completionTokens} tokens`,
  ].filter(Boolean);
  const prefill = stats.prefillTokensPerSecond ? ` at ${stats.prefillTokensPerSecond.toFixed(0)} tokens/s` : "";
  return <span class="stats" title={`Read ${stats.promptTokens} tokens${prefill}`}>{parts.join(" · ")}</span>;
}

export function CopyButton({ text }: { text: string }) {
  const [state, setState] = useState<{ icon: IconName; word: string }>({ icon: "copy", word: "Copy" });
  const click = async () => {
    setState((await copy(text)) ? { icon: "check", word: "Copied" } : { icon: "warn", word: "Not allowed" });
    setTimeout(() => setState({ icon: "copy", word: "Copy" }), 1500);
  };
  return <button class="action" onClick={click}><Icon name={state.icon} /> {state.word}</button>;
}
