import { useState } from "preact/hooks";
import type { Phase } from "../app/model";
import type { ServerModel } from "../app/server";
import { useStore } from "../app/store";
import { useApp } from "./context";
import { Icon } from "./icons";
import { CopyButton } from "./message";
import { Problem, Waiting } from "./model_card";

/** The server's state, its address for other programs, and its load. */
export function ServerCard({ server }: { server: ServerModel }) {
  const { phase, title } = useStore(server.state);
  const facts = useStore(server.facts);
  if (phase.name === "loading") return <Waiting title={`The model is loading${phase.stage ? `: ${phase.stage}` : ""}`} share={phase.share} />;
  if (phase.name === "starting") return <Waiting title="The model is loading" />;
  if (phase.name === "key") return <Key server={server} phase={phase} />;
  if (phase.name === "failed") return <Problem title="The server does not answer"><p>{phase.message}</p></Problem>;
  const state = facts?.models?.find(({ model }) => model === title);
  const curl =
    `curl ${server.base}v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n` +
    (server.key ? "  -H 'Authorization: Bearer YOUR_KEY' \\\n" : "") +
    `  -d '{"messages": [{"role": "user", "content": "Hello"}]}'`;
  return (
    <>
      <h2>{title}</h2>
      {state?.state === "unloaded" && <p class="hint">It is loaded with the first question.</p>}
      {state?.error && <p class="notice bad"><Icon name="warn" /> {state.error}</p>}
      <p>The server runs. Ask below, or give a program <code>{server.base}v1</code> as the base URL of an OpenAI API.</p>
      <div class="prose"><pre tabIndex={0}><code>{curl}</code></pre></div>
      <div class="prose row">
        <CopyButton text={curl} />
        {!server.key && <><a href="metrics">metrics</a> <a href="openapi.json">openapi.json</a></>}
      </div>
      <ServerFacts server={server} />
    </>
  );
}

/** The server's models, if it has several. */
export function ModelChoice({ server }: { server: ServerModel }) {
  const { title } = useStore(server.state);
  const { running } = useStore(useApp().chats.state);
  const models = useStore(server.facts)?.models ?? [];
  if (models.length < 2) return null;
  return (
    <select aria-label="Model" value={title} disabled={running !== null} onChange={(e) => void server.choose(e.currentTarget.value)}>
      {models.map(({ model, state }) => <option key={model} value={model}>{state === "ready" ? model : `${model} (${state})`}</option>)}
    </select>
  );
}

export function ServerFacts({ server }: { server: ServerModel }) {
  const facts = useStore(server.facts);
  if (!facts) return null;
  const number = (n: number) => n.toLocaleString("en");
  const rows: [string, string, string][] = [
    ["Requests", `${facts.running} running`, `${facts.waiting} waiting`],
    ["KV cache in use", `${(100 * facts.kv_usage).toFixed(1)} %`, `${number(facts.context_length)} tokens of context`],
    ["Answers", `${facts.perSecond.toFixed(1)} tokens/s`, `${number(facts.generated_tokens)} tokens so far`],
    ["Prompts", `${number(facts.prompt_tokens)} tokens`, `${number(facts.cached_tokens)} of them from the cache`],
    ["Model", facts.about.model_type ?? "", facts.about.quantization ?? ""],
    ["Device", facts.about.device ?? "", facts.about.target ?? ""],
  ];
  return (
    <dl class="facts">
      {rows.map(([name, value, more]) => <div key={name}><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>)}
    </dl>
  );
}

function Key({ server, phase }: { server: ServerModel; phase: Extract<Phase, { name: "key" }> }) {
  const [key, setKey] = useState("");
  const send = (event: Event) => {
    event.preventDefault();
    void server.setKey(key);
  };
  return (
    <form class="problem" onSubmit={send}>
      <h2>The server wants an API key</h2>
      {phase.wrong && <p class="notice bad" role="alert"><Icon name="warn" /> It does not take this one.</p>}
      <div class="row">
        <input type="password" aria-label="API key" autocomplete="off" value={key} onInput={(e) => setKey(e.currentTarget.value)} />
        <button class="primary" disabled={!key.trim()}>Use it</button>
      </div>
      <p class="hint">This tab keeps it until it is closed.</p>
    </form>
  );
}
