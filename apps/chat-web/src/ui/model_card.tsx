import type { ComponentChildren } from "preact";
import type { ModelState, Phase } from "../app/model";
import { useStore } from "../app/store";
import { bytes, duration } from "../model/format";
import { useBrowserModel } from "./context";
import { Icon } from "./icons";

/** The model's progress to the GPU, and the user's actions. */
export function ModelCard() {
  const model = useBrowserModel();
  const state = useStore(model.state);
  return <section class="card" aria-label="Model">{body(state.phase, state)}</section>;
}

function body(phase: Phase, state: ModelState) {
  switch (phase.name) {
    case "starting":
      return <Waiting title="Looking at this device" />;
    case "unsupported":
      return <Problem title="This browser cannot run the model"><p>{phase.text}</p></Problem>;
    case "offer":
      return <Offer state={state} phase={phase} />;
    case "downloading":
      return <Downloading state={state} phase={phase} />;
    case "broken":
      return <Broken phase={phase} />;
    case "loading":
      return <Waiting title="Loading the model on the GPU" share={phase.share} />;
    case "lost":
      return <Lost phase={phase} state={state} />;
    case "elsewhere":
      return <Elsewhere />;
    case "failed":
      return <Failed message={phase.message} state={state} />;
    case "key":
    case "ready":
      return null;
  }
}

function Offer({ state, phase }: { state: ModelState; phase: Extract<Phase, { name: "offer" }> }) {
  const model = useBrowserModel();
  const { refusal } = phase;
  const fetched = state.missing === 0;
  const go = () => void (fetched ? model.load() : model.download());
  return (
    <>
      <h2>{state.title}</h2>
      <p>The model runs in this browser, on your GPU. Nothing you write leaves this device.</p>
      <Facts state={state} />
      {refusal && (
        <div class="notice bad" role="alert">
          <Icon name="warn" />
          <div><strong>{refusal.title}.</strong> {refusal.text}</div>
        </div>
      )}
      {state.adapter?.fallback && !refusal && (
        <p class="notice"><Icon name="warn" /> This browser has only a software adapter: the model will run, slowly.</p>
      )}
      <div class="row">
        {!refusal && (
          <button class="primary" onClick={go}>
            {!fetched && <Icon name="download" />} {fetched ? "Load the model" : `Download ${bytes(state.missing)} and start`}
          </button>
        )}
        {refusal && <ShorterContext state={state} />}
        {refusal?.overridable && <button class="plain" onClick={go}>Try anyway</button>}
        {refusal && !refusal.overridable && <button class="plain" onClick={() => void model.start()}>Check again</button>}
      </div>
    </>
  );
}

/** Figures of the download and of the memory it needs. */
export function Facts({ state }: { state: ModelState }) {
  const { manifest, estimate, adapter, storage } = state;
  if (!manifest || !estimate || !adapter) return null;
  const free = storage ? storage.quota - storage.usage : null;
  return (
    <dl class="facts">
      <div>
        <dt>Download</dt>
        <dd>
          {state.missing === 0 ? "none: it is in this browser" : bytes(state.missing)}
          {free !== null && state.missing > 0 && <small>{bytes(free)} free for this site</small>}
        </dd>
      </div>
      <div>
        <dt>GPU memory</dt>
        <dd>
          about {bytes(estimate.total)}
          <small>
            {bytes(estimate.weights)} weights, {bytes(estimate.cache)} for {state.contextTokens.toLocaleString("en")} tokens of context,{" "}
            {bytes(estimate.workspace)} to work
          </small>
        </dd>
      </div>
      <div>
        <dt>GPU</dt>
        <dd>
          {adapter.name}
          <small>buffers up to {bytes(adapter.maxStorageBufferBindingSize)}, {adapter.features.includes("shader-f16") ? "with" : "without"} float16</small>
        </dd>
      </div>
      <div>
        <dt>Model</dt>
        <dd>{manifest.modelType}<small>{manifest.quantization}</small></dd>
      </div>
    </dl>
  );
}

function Downloading({ state, phase }: { state: ModelState; phase: Extract<Phase, { name: "downloading" }> }) {
  const model = useBrowserModel();
  const share = phase.total ? phase.done / phase.total : 0;
  const left = phase.left === null ? "" : `, ${duration(phase.left)} left`;
  const speed = phase.rate === null ? "" : ` at ${bytes(phase.rate)}/s`;
  return (
    <>
      <h2>Downloading {state.title}</h2>
      <Bar share={share} label="Download" />
      <p class="figures" aria-live="off">
        {bytes(phase.done)} of {bytes(phase.total)}{phase.retryingIn === null ? `${speed}${left}` : ""}
      </p>
      {phase.retryingIn !== null && (
        <p class="notice" role="status"><Icon name="warn" /> The connection broke. Trying again in {duration(phase.retryingIn)}; nothing is lost.</p>
      )}
      <div class="row"><button class="plain" onClick={() => model.pauseDownload()}><Icon name="pause" /> Pause</button></div>
    </>
  );
}

const BROKEN_TITLES = {
  network: "The download was interrupted",
  stopped: "The download is paused",
  missing: "A file is missing",
  changed: "The model has changed",
  corrupt: "A file was refused",
  quota: "The browser's storage is full",
};

function Broken({ phase }: { phase: Extract<Phase, { name: "broken" }> }) {
  const model = useBrowserModel();
  const { kind, message } = phase.failure;
  return (
    <Problem title={BROKEN_TITLES[kind]} calm={kind === "stopped"}>
      {kind !== "stopped" && <p>{message}</p>}
      <p>{bytes(phase.done)} of {bytes(phase.total)} are here and stay here.</p>
      <div class="row">
        <button class="primary" onClick={() => void model.download()}>{kind === "corrupt" ? "Fetch it again" : "Resume"}</button>
        {kind === "changed" && <button class="plain" onClick={() => location.reload()}>Reload the page</button>}
      </div>
    </Problem>
  );
}

function Lost({ phase, state }: { phase: Extract<Phase, { name: "lost" }>; state: ModelState }) {
  const model = useBrowserModel();
  return (
    <Problem title="The GPU was lost">
      <p>
        {phase.whileLoading
          ? "It went away while the model was loaded: most likely there was not enough GPU memory."
          : "The system or the browser took the GPU away: a driver was restarted, the computer slept, or memory ran short."}{" "}
        Your conversation is kept.
      </p>
      <p class="hint">The browser says: {phase.reason}</p>
      <div class="row">
        <button class="primary" onClick={() => void model.load()}><Icon name="redo" /> Load the model again</button>
        {phase.whileLoading && <ShorterContext state={state} />}
      </div>
    </Problem>
  );
}

function Elsewhere() {
  const model = useBrowserModel();
  return (
    <>
      <h2>The model is running in another tab</h2>
      <p>It takes GPU memory once, not once a tab. You can read and sort your conversations here, or move the model over.</p>
      <div class="row"><button class="primary" onClick={() => void model.load(true)}>Use it here</button></div>
    </>
  );
}

function Failed({ message, state }: { message: string; state: ModelState }) {
  const model = useBrowserModel();
  return (
    <Problem title="That did not work">
      <p>{message}</p>
      <div class="row">
        <button class="primary" onClick={() => void model.start()}>Try again</button>
        {state.manifest && <ShorterContext state={state} />}
      </div>
    </Problem>
  );
}

function ShorterContext({ state }: { state: ModelState }) {
  const model = useBrowserModel();
  const shorter = Math.ceil(state.contextTokens / 2);
  const { manifest, estimate } = state;
  // Not where the weights are what does not fit.
  const helps = manifest && estimate && shorter >= 512 && estimate.cache > estimate.total / 10;
  if (!helps) return null;
  return (
    <button class="plain" onClick={() => void model.setContext(shorter)}>
      Use a context of {shorter.toLocaleString("en")} tokens
    </button>
  );
}

export function Problem({ title, calm = false, children }: { title: string; calm?: boolean; children: ComponentChildren }) {
  return (
    <div class="problem" role={calm ? "status" : "alert"}>
      <h2 class={calm ? "" : "bad"}>{!calm && <Icon name="warn" />} {title}</h2>
      {children}
    </div>
  );
}

export function Waiting({ title, share = null }: { title: string; share?: number | null }) {
  return (
    <>
      <h2>{title}</h2>
      <Bar share={share} label={title} />
    </>
  );
}

export function Bar({ share, label }: { share: number | null; label: string }) {
  return <progress aria-label={label} max={1} {...(share === null ? {} : { value: share })} />;
}
