"""How much an answer may think, and whether its thoughts are given: by any of the names that servers have for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from mlcpipe.server.bodies import Body, Count
from mlcpipe.server.errors import ApiError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Tokens for efforts that a chat template does not take as a variable. Larger efforts have no bound.
_BUDGETS = {"minimal": 256, "low": 1024}
_BUDGET_FIELDS = (
    "thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Thoughts:
    """variables: of the chat template. budget: most tokens of thoughts, None for any number.

    effort: which sets a budget if the template does not take it. given: whether thoughts are part of the response,
    "inline": in the text, between their marks.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None
    effort: str | None = None
    given: Literal["apart", "inline", "no"] = "apart"

    def budget_with(self, *, takes_effort: bool) -> int | None:
        """The budget if the template takes an effort, or not."""
        return self.budget if self.budget is not None or takes_effort else _BUDGETS.get(self.effort or "")


class Reasoning(Body):
    """`reasoning` of OpenAI's Responses, with OpenRouter's other fields."""

    effort: str | None = None
    max_tokens: Count | None = Field(None, ge=0)
    exclude: bool | None = None
    enabled: bool | None = None


class ThinkingFields(Body):
    """Fields of a chat: budgets of Qwen, SGLang, llama.cpp and vLLM, `thinking` of GLM, DeepSeek and Kimi."""

    reasoning_effort: str | None = None
    thinking_budget: Count | None = Field(None, ge=-1)
    thinking_budget_tokens: Count | None = Field(None, ge=-1)
    thinking_token_budget: Count | None = Field(None, ge=-1)
    reasoning_budget: Count | None = Field(None, ge=-1)
    reasoning_budget_tokens: Count | None = Field(None, ge=-1)
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    reasoning: Reasoning | None = None

    def thoughts(self) -> Thoughts:
        """Raises ApiError for contradictions."""
        reasoning = self.reasoning or Reasoning(max_tokens=None)
        switches = [self.enable_thinking, reasoning.enabled]
        budgets = [getattr(self, name) for name in _BUDGET_FIELDS] + [reasoning.max_tokens]
        if isinstance(self.thinking, dict):
            on, budget = thinking_of(self.thinking)
            switches.append(on)
            budgets.append(budget)
        else:
            switches.append(self.thinking)
        efforts = [self.reasoning_effort, reasoning.effort]
        switch, effort = _one(switches, "enable_thinking"), _one(efforts, "reasoning_effort")
        budget = _one(budgets, "thinking_budget")
        variables = effort_variables(effort)
        if switch is not None:
            variables = {"enable_thinking": switch, **variables}
        inline = self.reasoning_format == "none" or self.separate_reasoning is False
        hidden = self.include_reasoning is False or reasoning.exclude is True
        if inline and hidden:
            raise ApiError(400, "include_reasoning: not false with thoughts in the text", param="include_reasoning")
        return Thoughts(
            variables, None if budget == -1 else budget, effort, "inline" if inline else "no" if hidden else "apart"
        )


def effort_variables(effort: str | None, name: str = "reasoning_effort") -> dict[str, Any]:
    """Variables of chat templates for an effort of reasoning, a field of this `name`. Raises ApiError."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise ApiError(400, f"{name}: expected one of {', '.join(EFFORTS)}", param=name)
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def thinking_of(thinking: Mapping[str, Any]) -> tuple[bool | None, int | None]:
    """Whether Anthropic's `thinking` asks for thoughts, and their budget. Raises ApiError."""
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(400, "thinking.type: expected enabled, disabled or adaptive", param="thinking")
    if budget is not None and (type(budget) is not int or budget < 0):
        raise ApiError(400, "thinking.budget_tokens: expected a number of tokens", param="thinking")
    return kind != "disabled", budget if kind == "enabled" else None


def _one(values: list[Any], name: str) -> Any:
    """The value that is given, by one name or by several."""
    given = {value for value in values if value is not None}
    if len(given) > 1:
        raise ApiError(400, f"{name}: expected one value, found {len(given)} in fields of several servers", param=name)
    return next(iter(given), None)
