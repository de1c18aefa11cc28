"""Ask a model one question: python examples/chat.py [hf://org/name, a checkpoint folder or a bundle]"""

import sys

import mlcpipe

engine = mlcpipe.load(sys.argv[1] if len(sys.argv) > 1 else None)
answer = engine.chat(
    [{"role": "user", "content": "What can mlcpipe do?"}],
    sampling=mlcpipe.SamplingParams(temperature=0),
    max_tokens=100,
)
print(answer.text)
print(f"{answer.finish_reason}, {answer.stats.decode_tok_s:.0f} tokens per second", file=sys.stderr)
