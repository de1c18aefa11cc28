"""What Codex CLI wants to know of a model: an entry of `models`, beside `data`, of `/v1/models?client_version=…`.

The form is `ModelInfo` of codex-rs/protocol/src/openai_models.rs. Without it Codex assumes the context of a model of
OpenAI's.
"""

from __future__ import annotations

from typing import Any

# Short ones, as contexts are: Codex sends them in the place of its own, which explain tools of OpenAI's models.
_INSTRUCTIONS = """\
You are a coding agent that works in a terminal, in a folder of the user's computer. You read files, run commands and \
change files with the shell tool.

- Look at the files that matter before you change anything, and keep to their style.
- Make the smallest change that solves the task. Run the tests or the program afterwards, and fix what fails.
- Never discard work of the user's: no `git reset --hard`, no `rm` of files that you did not make.
- Continue until the task is done, then say in a few sentences what you changed and what you ran.
- If you are not sure what the user wants, ask."""
_OUTPUT_BYTES = 10_000  # of a command that Codex shows the model


def described(name: str, context_length: int | None) -> dict[str, Any]:
    """One model."""
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": _OUTPUT_BYTES},
        "supports_parallel_tool_calls": True,
        "context_window": context_length,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
