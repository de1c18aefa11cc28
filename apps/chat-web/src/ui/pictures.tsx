import { useRef } from "preact/hooks";
import { ACCEPTED } from "../chat/pictures";
import { Icon } from "./icons";

/** Pictures in a row; `onRemove` gets the place of one. */
export function Pictures({ urls, onRemove }: { urls: readonly string[]; onRemove?: (at: number) => void }) {
  if (urls.length === 0) return null;
  return (
    <div class="pictures">
      {urls.map((url, at) => (
        <figure key={at}>
          <img src={url} alt={`Picture ${at + 1}`} />
          {onRemove && <button type="button" class="square small" aria-label={`Remove picture ${at + 1}`} onClick={() => onRemove(at)}><Icon name="close" /></button>}
        </figure>
      ))}
    </div>
  );
}

/** Opens the files, or the camera of a phone. */
export function AttachButton({ onFiles }: { onFiles: (files: File[]) => void }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        type="file"
        accept={ACCEPTED}
        multiple
        hidden
        onChange={(e) => {
          onFiles([...(e.currentTarget.files ?? [])]);
          e.currentTarget.value = "";
        }}
      />
      <button type="button" class="square" aria-label="Attach a picture" title="Attach a picture" onClick={() => input.current!.click()}>
        <Icon name="picture" />
      </button>
    </>
  );
}
