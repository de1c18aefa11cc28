"""What Python's engine answers in a conversation."""

from __future__ import annotations

from mlcpipe import Engine, SamplingParams

QUESTIONS = ('What is a "compiler"?', "Is it fast? 🎉")
GREEDY = SamplingParams(temperature=0.0)


def conversation(engine: Engine, questions: tuple[str, ...] = QUESTIONS) -> list[tuple[list[int], str, int]]:
    """Prompt, text and number of tokens of each greedy answer."""
    messages, said = [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = list(engine.tokenizer.encode_chat(messages))
        answer = engine.chat(messages, sampling=GREEDY)
        messages.append({"role": "assistant", "content": answer.text})
        said.append((prompt, answer.text, answer.stats.completion_tokens))
    return said
