/** The integers of a step: `tir_schedules/step_layout.py` says what is where. */

import { PAGE_TOKENS } from "../../model/states";

/** Consecutive tokens of the conversation, from position `begin` on. */
export interface Span {
  begin: number;
  rows: number;
  /** RoPE's frequencies follow this length, or the position where that is greater. */
  ropeLength: number;
  /** Of each group: entry i is the page of tokens 16 i to 16 i + 15; -1 where no row sees them. */
  tables: number[][];
  /** The slots with the states before the first row (-1: zeros) and after the last; null for models without. */
  slots: [read: number, write: number] | null;
}

const HEADER = 32;
const [SEQUENCES, ROWS, POSITION, PLACE, ROW_BEGIN, KEYS, TABLE_BEGIN, ROPE_LENGTH, SEQUENCE] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const [SLOT_READ, SLOT_WRITE, TABLES] = [11, 12, 16];

export function stepIntegers({ begin, rows, ropeLength, tables, slots }: Span): Int32Array {
  const positions = Array.from({ length: rows }, (_, row) => begin + row);
  const place = (position: number): number => tables[0]![Math.floor(position / PAGE_TOKENS)]! * PAGE_TOKENS + (position % PAGE_TOKENS);
  const parts: [field: number, values: number[]][] = [
    [POSITION!, positions],
    [PLACE!, positions.map(place)],
    [ROPE_LENGTH!, positions.map((position) => Math.max(position + 1, ropeLength))],
    [SEQUENCE!, positions.map(() => 0)],
    [ROW_BEGIN!, [0, rows]],
    [KEYS!, [begin + rows]],
    [TABLE_BEGIN!, [0, tables[0]!.length]],
    ...tables.map((table, group): [number, number[]] => [TABLES! + group, table]),
  ];
  if (slots) parts.push([SLOT_READ!, [slots[0]]], [SLOT_WRITE!, [slots[1]]]);
  const step = new Int32Array(HEADER + parts.reduce((sum, [, values]) => sum + values.length, 0));
  [step[SEQUENCES!], step[ROWS!]] = [1, rows];
  let at = HEADER;
  for (const [field, values] of parts) {
    step[field] = at;
    step.set(values, at);
    at += values.length;
  }
  return step;
}
