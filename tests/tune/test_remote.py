"""Measuring over TVM's RPC: a server with a key on this machine, for less than two minutes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mlcpipe.errors import TargetError
from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.tuning.inputs import inputs_of
from mlcpipe.tuning.measure import Bench
from mlcpipe.tuning.remote import Address, RemoteCpu
from tir_schedules.cpu.attention import AttentionShape, kv_cache_functions

# What `python -m tvm.exec.rpc_server` starts in a process of its own, for which it needs cloudpickle.
SERVER = """
import signal, sys
from tvm.rpc.server import PopenRPCServerState
signal.alarm(100)
state = PopenRPCServerState("127.0.0.1", int(sys.argv[1]), int(sys.argv[1]) + 1, key=sys.argv[2], silent=True)
print(state.port, flush=True)
state.thread.join()
"""
KEY = "a-key-of-this-test"
TARGET = load_target("cpu-native")
VARIANT = compiled_variants(TARGET)[0]


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and int(server.stdout.readline()) == port
            yield Address("127.0.0.1", port, KEY)
        finally:
            server.kill()


def test_kernels_are_measured_on_a_server_by_its_key(address: Address) -> None:
    with pytest.raises(TargetError, match="expected one with this key"):
        RemoteCpu(TARGET, VARIANT, Address(address.host, address.port, "another"))
    runner = RemoteCpu(TARGET, VARIANT, address)
    matmul = definitions.matmul(load_scheme("q4f16_1"), load_layout("rows16"), 64, 256, "float32")
    cases = (
        ("cpu.matmul", matmul, inputs_of(matmul, 5), {"gemm_rows": 4}),
        ("cpu.attention", attention := kv_cache_functions(AttentionShape(4, 2, 32, "float32"), 1)["decode"],
         inputs_of(attention, 1, 40), {"attention_rows": 1}),
    )  # fmt: skip
    for rule, func, given, choice in cases:
        bench = Bench(runner, TARGET, rule, func, given, VARIANT.schedule)
        pairs = bench.pairs(choice, 2)  # two libraries: one of the same name would be the first again
        assert len(pairs) == 2 and all(0 < seconds < 1 for pair in pairs for seconds in pair)
