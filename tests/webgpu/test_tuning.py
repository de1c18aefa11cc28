"""Measuring for browsers: a choice beside the default, in Node."""

from __future__ import annotations

import pytest

from mlcpipe.errors import CompileError
from mlcpipe.nn import definitions
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.tuning import node
from mlcpipe.tuning.inputs import inputs_of
from tests.webgpu import dawn

pytestmark = pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing())

TARGET = load_target("webgpu")
VARIANT = compiled_variants(TARGET)[0]


def test_a_choice_is_measured_beside_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_ICD_FILENAMES", dawn.usual_driver())
    monkeypatch.setattr(node, "MAX_EXTRA_COMPILE_S", 20.0)  # on a busy machine
    func = definitions.rms_norm(64, 1e-5, "float32", "float32")
    bench = node.Bench(TARGET, VARIANT, "gpu.norm", func, inputs_of(func, 3))
    try:
        pairs = bench.pairs({"norm_threads.many": 8}, 2)
        assert len(pairs) == 2 and all(seconds > 0 for pair in pairs for seconds in pair)
        monkeypatch.setattr(node, "MAX_EXTRA_COMPILE_S", -20.0)
        with pytest.raises(CompileError, match="take too long to compile"):
            bench.pairs({"norm_threads.many": 8}, 2)
    finally:
        bench.close()
