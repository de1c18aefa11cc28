"""A conversation of two questions, each answer printed as it comes: python examples/stream.py [model]"""

import sys

import mlcpipe

engine = mlcpipe.load(sys.argv[1] if len(sys.argv) > 1 else None)
messages = [{"role": "system", "content": "Be brief."}]
for question in ("Who are you?", "How do I compile a model for Vulkan?"):
    messages.append({"role": "user", "content": question})
    answer = ""
    for chunk in engine.chat(messages, sampling=mlcpipe.SamplingParams(seed=1), max_tokens=60, stream=True):
        print(chunk.text, end="", flush=True)
        answer += chunk.text
    print(f"\n[{chunk.stats.cached_tokens} of {chunk.stats.prompt_tokens} prompt tokens were in the KV cache]")
    messages.append({"role": "assistant", "content": answer})
