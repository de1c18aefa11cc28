import { useEffect, useRef, useState } from "preact/hooks";
import { DEFAULT_SAMPLING } from "../chat/conversation";
import { KNOBS, type Knob, type Theme } from "../app/settings";
import { useStore } from "../app/store";
import { bytes } from "../model/format";
import { useApp, useBrowserModel } from "./context";
import { Icon } from "./icons";
import { Facts } from "./model_card";
import { ServerFacts } from "./server_card";

/** System prompt, sampling, and facts about the model and this device. */
export function SettingsDialog({ open, onClose }: { open: boolean; onClose(): void }) {
  const { server } = useApp();
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (open) dialog.current!.showModal();
    else dialog.current!.close();
  }, [open]);
  const outside = (event: MouseEvent) => event.target === dialog.current && onClose();
  return (
    <dialog ref={dialog} class="drawer" aria-labelledby="settings-title" onClose={onClose} onClick={outside}>
      {open && (
        <div class="panel">
          <header class="row spread">
            <h2 id="settings-title">Settings</h2>
            <button class="square" onClick={onClose} aria-label="Close the settings"><Icon name="close" /></button>
          </header>
          <SystemPrompt />
          <SamplingPanel />
          <ThemePanel />
          {server ? <section><h3>Server</h3><ServerFacts server={server} /></section> : <ModelPanel />}
          <DataPanel />
        </div>
      )}
    </dialog>
  );
}

function SystemPrompt() {
  const { chats } = useApp();
  useStore(chats.state);
  const [text, setText] = useState(chats.current().system);
  return (
    <section>
      <h3><label for="system">System prompt</label></h3>
      <textarea
        id="system"
        rows={3}
        placeholder="None. Tell the model who it is and how to answer."
        value={text}
        onInput={(e) => setText(e.currentTarget.value)}
        onBlur={() => void chats.setSystem(text)}
      />
      <p class="hint">For the open conversation and for new ones.</p>
    </section>
  );
}

function SamplingPanel() {
  const { settings } = useApp();
  const { sampling } = useStore(settings);
  const set = (part: Partial<typeof sampling>) => settings.patch({ sampling: { ...settings.get().sampling, ...part } });
  return (
    <section>
      <h3>Answers</h3>
      {KNOBS.map((knob) => <Slider key={knob.key} knob={knob} value={sampling[knob.key]} onChange={(value) => set({ [knob.key]: value })} />)}
      <div class="knob">
        <label for="seed">Seed</label>
        <input
          id="seed"
          type="number"
          step={1}
          placeholder="random"
          value={sampling.seed ?? ""}
          aria-describedby="seed-help"
          onInput={(e) => set({ seed: Number.isSafeInteger(e.currentTarget.valueAsNumber) ? e.currentTarget.valueAsNumber : null })}
        />
        <p class="hint" id="seed-help">With a seed, the same question gets the same answer.</p>
      </div>
      <button class="plain" onClick={() => set(DEFAULT_SAMPLING)}>Back to the defaults</button>
    </section>
  );
}

function Slider({ knob, value, onChange }: { knob: Knob; value: number; onChange(value: number): void }) {
  const shown = Number.isInteger(knob.step) ? String(value) : value.toFixed(2);
  return (
    <div class="knob">
      <label for={knob.key}>{knob.label}</label>
      <output for={knob.key}>{shown}</output>
      <input
        id={knob.key}
        type="range"
        min={knob.min}
        max={knob.max}
        step={knob.step}
        value={value}
        aria-describedby={`${knob.key}-help`}
        onInput={(e) => onChange(e.currentTarget.valueAsNumber)}
      />
      <p class="hint" id={`${knob.key}-help`}>{knob.help}</p>
    </div>
  );
}

const THEMES: { value: Theme; label: string }[] = [
  { value: "system", label: "As the system" },
  { value: "light", label: "Light" },
  { value: "dark", label: "Dark" },
];

function ThemePanel() {
  const { settings } = useApp();
  const { theme } = useStore(settings);
  return (
    <fieldset class="choice">
      <legend>Colours</legend>
      {THEMES.map(({ value, label }) => (
        <label key={value}>
          <input type="radio" name="theme" checked={theme === value} onChange={() => settings.patch({ theme: value })} />
          <span>{label}</span>
        </label>
      ))}
    </fieldset>
  );
}

function ModelPanel() {
  const model = useBrowserModel();
  const state = useStore(model.state);
  const [report, setReport] = useState("");
  const { manifest, storage } = state;
  if (!manifest) return null;
  const verify = async () => {
    setReport("Checking…");
    setReport(await model.verify((share) => setReport(`Checking… ${Math.round(share * 100)} %`)));
  };
  return (
    <section>
      <h3>Model and device</h3>
      <Facts state={state} />
      <ContextChoice longest={manifest.contextLength} tokens={state.contextTokens} />
      {storage && (
        <p class="hint">
          This site uses {bytes(storage.usage)} of the {bytes(storage.quota)} that the browser grants.{" "}
          {storage.persisted ? "The browser keeps it until you delete it." : "The browser may delete it when the disk gets full."}
        </p>
      )}
      <Limits />
      <div class="row">
        <button class="plain" onClick={() => void verify()} disabled={state.missing > 0}>Check the files</button>
        <button class="plain" onClick={() => void model.remove()} disabled={state.missing === manifest.totalBytes}>Remove the model</button>
      </div>
      <p class="hint" role="status">{report}</p>
    </section>
  );
}

function ContextChoice({ longest, tokens }: { longest: number; tokens: number }) {
  const model = useBrowserModel();
  const steps = [longest];
  while (steps.at(-1)! > 1024) steps.push(Math.ceil(steps.at(-1)! / 2));
  if (tokens > 0 && !steps.includes(tokens)) steps.push(tokens);
  return (
    <div class="knob">
      <label for="context">Context</label>
      <select id="context" value={tokens} onChange={(e) => void model.setContext(Number(e.currentTarget.value))}>
        {steps.sort((a, b) => b - a).map((n) => <option key={n} value={n}>{n.toLocaleString("en")} tokens</option>)}
      </select>
      <p class="hint">How far the model looks back. Less needs less GPU memory; a change loads the model again.</p>
    </div>
  );
}

function Limits() {
  const model = useBrowserModel();
  const { adapter } = useStore(model.state);
  if (!adapter) return null;
  return (
    <details>
      <summary>Limits of {adapter.name}</summary>
      <dl class="limits">
        <dt>Largest buffer</dt><dd>{bytes(adapter.maxBufferSize)}</dd>
        <dt>Largest storage binding</dt><dd>{bytes(adapter.maxStorageBufferBindingSize)}</dd>
        <dt>Storage buffers in a shader</dt><dd>{adapter.maxStorageBuffersPerShaderStage}</dd>
        <dt>Workgroup memory</dt><dd>{bytes(adapter.maxComputeWorkgroupStorageSize)}</dd>
        <dt>Invocations in a workgroup</dt><dd>{adapter.maxComputeInvocationsPerWorkgroup}</dd>
        <dt>Features</dt><dd>{adapter.features.join(", ") || "none"}</dd>
      </dl>
    </details>
  );
}

function DataPanel() {
  const { chats } = useApp();
  const { list } = useStore(chats.state);
  const dialog = useRef<HTMLDialogElement>(null);
  return (
    <section>
      <h3>Conversations</h3>
      <p class="hint">{list.length} kept in this browser, and nowhere else.</p>
      <button class="plain" disabled={list.length === 0} onClick={() => dialog.current!.showModal()}>Delete all</button>
      <dialog ref={dialog} class="ask" aria-label="Delete all conversations">
        <p>Delete all {list.length} conversations? They are kept nowhere else.</p>
        <form method="dialog" class="row end">
          <button class="plain">Keep</button>
          <button class="danger" onClick={() => void chats.removeAll()}>Delete all</button>
        </form>
      </dialog>
    </section>
  );
}
