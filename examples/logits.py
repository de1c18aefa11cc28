"""The most likely next tokens after a text, and how likely the text is: python examples/logits.py [model] [text]"""

import sys

import numpy as np

import mlcpipe

engine = mlcpipe.load(sys.argv[1] if len(sys.argv) > 1 else None)
tokens = engine.tokenizer.encode(sys.argv[2] if len(sys.argv) > 2 else "To compile a model, type `mlcpipe")
logits = engine.logits(tokens)  # f32[len(tokens), vocab_size]
log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

print("perplexity", np.exp(-log_probs[np.arange(len(tokens) - 1), tokens[1:]].mean()))
for token in np.argsort(log_probs[-1])[:-6:-1]:
    print(f"{np.exp(log_probs[-1, token]):6.1%}  {engine.tokenizer.decode([int(token)])!r}")
