"""How one model calls tools: the style of its template, and grammars for answers that call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace

from mlcpipe.errors import MlcpipeError, UsageError
from mlcpipe.runtime.response_format import ANY_OBJECT
from mlcpipe.runtime.serving.grammar import Grammar, GrammarCompiler, GrammarSource, Thinking
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tool_formats import format_for
from mlcpipe.runtime.tool_formats.style import Tool
from mlcpipe.runtime.tools import ToolChoice

_MOST_REFUSED = 4096  # schemas


class ToolCalling:
    """The style of a tokenizer's templates. `shown`: control tokens that its parser reads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.style = format_for(tokenizer.chat_templates)
        self.grammars = GrammarCompiler(tokenizer, vocab_size)
        self._literals = {
            tokenizer.token_bytes(index).decode(errors="replace"): index
            for index in tokenizer.control_token_ids
            if index < vocab_size
        }
        self.shown = [self._literals[text] for text in self.style.shown if text in self._literals]
        self._refused: set[bytes] = set()  # digests of tools' schemas that cannot be honoured

    def literal(self, text: str) -> str:
        """A marker in a Lark grammar: a control token by its id, other text in quotes."""
        index = self._literals.get(text)
        return json.dumps(text) if index is None else f"<[{index}]>"

    def form(self, source: GrammarSource, thinking: Thinking) -> GrammarSource:
        """The form of an answer, after what the style writes before it."""
        return replace(source, thinking=thinking, before=self.style.before_answer(self.literal))

    def source(
        self,
        choice: ToolChoice,
        form: GrammarSource | None,
        thinking: Thinking,
        refused: Collection[bytes] | None = None,
    ) -> GrammarSource | None:
        """The grammar of an answer that calls tools, or else of `form`, an answer without a call.

        Schemas that were `refused` (None: of all requests) become any object, unless their tool is strict.
        """
        loose = self._refused if refused is None else refused
        tools = [
            replace(tool, parameters=ANY_OBJECT) if not tool.strict and _digest(tool) in loose else tool
            for tool in choice.tools
        ]
        forced = choice.forced or form is not None
        made = self.style.grammar(tools, self.literal, forced=forced, parallel=choice.parallel)
        if made is not None and form is not None and not choice.forced:
            text = f"start: calls | {'before ' * self.style.channels}@form\n"
            text += made.text.replace("start:", "calls:", 1)
            made = replace(made, text=text, parts=(*made.parts, ("form", form.text)))
        return None if made is None else replace(made, thinking=thinking)

    def find_refused(self, tools: Sequence[Tool]) -> set[bytes]:
        """Tools whose schemas cannot be honoured; all tools if the schemas only fail together.

        Raises UsageError, which names the tool, for the grammar of a custom one.
        """
        found = set()
        for tool in tools:
            try:
                made = self.style.grammar([tool], self.literal, forced=True, parallel=False)
                if made is not None:
                    self.grammars.compile(made)
            except MlcpipeError as error:
                if tool.custom:
                    raise UsageError(f"the grammar of the tool {tool.name}", found=error) from None
                found.add(_digest(tool))
        if len(self._refused) > _MOST_REFUSED:
            self._refused.clear()
        self._refused |= found
        return found or {_digest(tool) for tool in tools}

    def grammar(self, choice: ToolChoice, form: GrammarSource | None, thinking: Thinking) -> Grammar | None:
        """The compiled grammar of an answer; None for any. Raises UsageError for one that cannot be honoured."""
        if not choice.tools:
            return None if form is None else self.grammars.compile(self.form(form, thinking))
        try:
            made = self.source(choice, form, thinking)
            return None if made is None else self.grammars.compile(made)
        except MlcpipeError:
            made = self.source(choice, form, thinking, self.find_refused(choice.tools))
            return None if made is None else self.grammars.compile(made)


def _digest(tool: Tool) -> bytes:
    return hashlib.sha256(json.dumps([tool.parameters, tool.lark]).encode()).digest()
