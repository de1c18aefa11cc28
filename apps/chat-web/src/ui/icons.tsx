/** Line icons on a grid of 24, drawn for this page. Each stands beside a word or has a label on its button. */

const PATHS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V6M6 12l6-6 6 6",
  stop: "M7 7h10v10H7z",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  gear: "M4 8h9M17 8h3M4 16h3M11 16h9M15 5.5v5M9 13.5v5",
  chip: "M7 7h10v10H7zM10 4v3M14 4v3M10 17v3M14 17v3M4 10h3M4 14h3M17 10h3M17 14h3",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  redo: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  pencil: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12M10.5 10.5v5M13.5 10.5v5",
  download: "M12 4v11M7 10.5l5 5 5-5M5 20h14",
  down: "M12 5v13M6 12l6 6 6-6",
  warn: "M12 4l9 16H3zM12 10v4.5M12 17.2v.3",
  picture: "M4 6h16v12H4zM4 16l4.5-4.5L13 16l3-3 4 4M15.5 9.5v.01",
  pause: "M9 6v12M15 6v12",
  sun: "M12 8.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6L7 7M17 17l1.4 1.4M18.4 5.6L17 7M7 17l-1.4 1.4",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
