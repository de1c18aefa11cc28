"""What the tokens of a window say about time (github.com/openai/whisper, transcribe.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIMESTAMP_S = 0.02
FRAMES_PER_S = 100
FRAMES_OF_TIMESTAMP = 2


@dataclass(frozen=True)
class Piece:
    """Tokens between two times in seconds of the whole sound."""

    start: float
    end: float
    tokens: tuple[int, ...]


def pieces_of(tokens: Sequence[int], timestamps: int, frame: int, frames: int) -> tuple[list[Piece], int]:
    """The pieces of a window's tokens, and the frames to the next window.

    Args:
        tokens: those of the answer, without its end.
        timestamps: the token of 0 s.
        frame: where the window begins in the sound.
        frames: of sound in the window.

    Two times one after the other end a piece and begin the next; what comes after the last such pair is heard again. A
    single time at the end says that no speech follows it.
    """
    offset, is_time = frame / FRAMES_PER_S, [token >= timestamps for token in tokens]
    ends = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    whole = is_time[-2:] == [False, True]
    if not ends:
        times = [token for token in tokens if token >= timestamps]
        length = frames / FRAMES_PER_S
        if times and times[-1] != timestamps:
            length = (times[-1] - timestamps) * TIMESTAMP_S
        return [Piece(offset, offset + length, tuple(tokens))], frames
    ends += [len(tokens)] if whole else []
    pieces, begin = [], 0
    for end in ends:
        part = tokens[begin:end]
        start, stop = ((one - timestamps) * TIMESTAMP_S for one in (part[0], part[-1]))
        pieces.append(Piece(offset + start, offset + stop, tuple(part)))
        begin = end
    if whole:
        return pieces, frames
    return pieces, (tokens[begin - 1] - timestamps) * FRAMES_OF_TIMESTAMP
