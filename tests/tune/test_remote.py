"""Measuring over TVM's RPC: servers with a key and a tracker on this machine, for less than two minutes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mlcpipe.errors import TargetError, UsageError
from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.tuning.inputs import inputs_of
from mlcpipe.tuning.measure import Bench
from mlcpipe.tuning.remote import Address, RemoteCpu, parse_address
from tir_schedules.cpu.attention import AttentionShape, kv_cache_functions

# What `python -m tvm.exec.rpc_server` and `rpc_tracker` start in processes of their own, for which they need cloudpickle:
# a server, a tracker, and a server that offers itself there.
SERVER = """
import signal, sys
from tvm.rpc.server import PopenRPCServerState
from tvm.rpc.tracker import PopenTrackerServerState
signal.alarm(100)
port, key = int(sys.argv[1]), sys.argv[2]
server = PopenRPCServerState("127.0.0.1", port, port + 1, key=key, silent=True)
tracker = PopenTrackerServerState("127.0.0.1", port + 1, port + 100, silent=True)
other = PopenRPCServerState("127.0.0.1", port + 101, port + 200, tracker_addr=("127.0.0.1", tracker.port), key=key, silent=True)
print(tracker.port, flush=True)
server.thread.join()
"""
KEY = "a-key-of-this-test"
TARGET = load_target("cpu-native")
VARIANT = compiled_variants(TARGET)[0]


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[Address, Address]]:
    """A server's, and a tracker's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = min(free.getsockname()[1], 65000)
    command = [sys.executable, "-c", SERVER, str(port), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            tracker = int(server.stdout.readline())
            yield Address("127.0.0.1", port, KEY), Address("127.0.0.1", tracker, KEY, tracker=True)
        finally:
            server.kill()


def test_kernels_are_measured_on_a_server_by_its_key(addresses: tuple[Address, Address]) -> None:
    address, _ = addresses
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


def test_a_tracker_names_a_server(addresses: tuple[Address, Address]) -> None:
    runner = RemoteCpu(TARGET, VARIANT, addresses[1])
    kernel = definitions.matmul(load_scheme("q4f16_1"), load_layout("rows16"), 64, 256, "float32")
    bench = Bench(runner, TARGET, "cpu.matmul", kernel, inputs_of(kernel, 5), VARIANT.schedule)
    assert len(bench.pairs({"gemm_rows": 4}, 1)) == 1


def test_addresses() -> None:
    assert parse_address("board.local:9090", "k") == Address("board.local", 9090, "k")
    assert parse_address("tracker:[::1]:9190", "k") == Address("::1", 9190, "k", tracker=True)
    with pytest.raises(UsageError, match="expected HOST:PORT or tracker:HOST:PORT"):
        parse_address("other:host:9190", "k")
