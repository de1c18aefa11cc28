"""Compile a checkpoint into a bundle, then run it: python examples/compile.py CHECKPOINT OUTPUT"""

import sys

import mlcpipe

if len(sys.argv) != 3:
    sys.exit(__doc__)
try:
    bundle = mlcpipe.compile(
        sys.argv[1],  # a folder or hf://org/name
        target="cpu-native",  # this machine; "cpu" runs on every CPU of the architecture
        quantization="q8f16_1",
        context_length=512,
        output=sys.argv[2],
    )
except mlcpipe.MlcpipeError as error:
    sys.exit(f"error: {error}")
engine = mlcpipe.Engine(bundle)
print(f"{bundle}: {engine.manifest.memory_plan.weights_bytes / 2**20:.1f} MiB of weights on {engine.device}")
print(engine.generate("Once upon a time", max_tokens=20).text)
