"""Separates reasoning, between `<think>` and `</think>`, from the answer."""

from __future__ import annotations

from mlcpipe.runtime.text.streaming import StopMatcher

BEGIN, END = "<think>", "</think>"


class ReasoningSplitter:
    """Takes streaming text, returns (reasoning, answer).

    `open` is true if the prompt has opened the reasoning. Reasoning only occurs at the beginning of an answer. White
    space around the tags is dropped.
    """

    def __init__(self, *, open: bool = False) -> None:
        self._state = "inside" if open else "before"
        self._held = ""
        self._end = StopMatcher([END])
        self._begun = False  # whether any reasoning was given
        self._space = ""

    @property
    def inside(self) -> bool:
        """Whether the current text is reasoning."""
        return self._state == "inside"

    def push(self, text: str) -> tuple[str, str]:
        """The text that is decided."""
        reasoning = ""
        while text:
            if self._state == "before":
                self._held, text = self._held + text, ""
                start = self._held.lstrip()
                if start.startswith(BEGIN):
                    self._state, text, self._held = "inside", start[len(BEGIN) :], ""
                elif not BEGIN.startswith(start):
                    given, self._held, self._state = self._held, "", "answer"
                    return reasoning, given
            elif self._state == "inside":
                shown, found = self._end.push(text)
                text = self._end.rest
                reasoning += self._trimmed(shown)
                if found:
                    self._state = "after"
            elif self._state == "after":
                text = text.lstrip()
                self._state = "answer" if text else "after"
            else:
                return reasoning, text
        return reasoning, ""

    def finish(self) -> tuple[str, str]:
        """The rest, at the end."""
        if self._state == "inside":
            return self._trimmed(self._end.flush()), ""
        return "", self._held

    def _trimmed(self, text: str) -> str:
        whole = self._space + text if self._begun else text.lstrip()
        kept = whole.rstrip()
        self._space = whole[len(kept) :]
        self._begun = self._begun or bool(kept)
        return kept
