"""Measuring on another machine's CPU, over TVM's RPC.

The board runs `python -m tvm.exec.rpc_server --host ADDRESS --port PORT --key KEY`, with the package cloudpickle and
a C compiler, which links what it is sent. With `--tracker HOST:PORT` it offers itself to a `python -m
tvm.exec.rpc_tracker` (which needs tornado, too), and that gives the boards of one key to who asks, one at a time.
TVM's protocol is not encrypted and runs what it is sent: give it an address that only this machine reaches, a key, and
no longer than tuning takes. Nothing here listens.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import rpc, tirx

from mlcpipe.errors import TargetError, UsageError
from mlcpipe.targets import Target, Variant
from mlcpipe.tuning.measure import KERNEL, Array, llvm_module

_SESSION_S = 120
# Before every call all arguments but the first, x, leave the caches; it knows no numbers among them.
_FLUSH = "cache_flush_cpu_non_first_arg"


@dataclass(frozen=True)
class Address:
    """A server of TVM's RPC, or a tracker of servers, and the key that the server was started with."""

    host: str
    port: int
    key: str
    tracker: bool = False


def parse_address(text: str, key: str) -> Address:
    """HOST:PORT of a server, or tracker:HOST:PORT, and a key. Raises UsageError."""
    match = re.fullmatch(r"(tracker:)?([A-Za-z0-9_.-]{1,253}|\[[0-9a-fA-F:]+\]):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise UsageError("--rpc", expected="HOST:PORT or tracker:HOST:PORT", found=repr(text)[:80])
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", key):
        raise UsageError("--rpc-key", expected="the key of the server: letters, digits and _.-", found=repr(key)[:80])
    return Address(match[2].strip("[]"), int(match[3]), key, match[1] is not None)


class RemoteFunction:
    """A kernel on the server; called with tensors of the server."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._function = module[KERNEL]

    def __call__(self, *values: Any) -> None:
        self._function(*values)


def _session(address: Address) -> Any:
    """The server, from a tracker the next that is free; what it does not give in time the worker's limit ends."""
    if not address.tracker:
        return rpc.connect(address.host, address.port, key=address.key, session_timeout=_SESSION_S)
    return rpc.connect_tracker(address.host, address.port).request(address.key, session_timeout=_SESSION_S)


class RemoteCpu:
    """`measure.Runner` for the CPU of a server. Raises TargetError where it cannot be reached."""

    def __init__(self, target: Target, variant: Variant, address: Address) -> None:
        self._target, self._variant = target, variant
        try:
            self._session = _session(address)
        except (RuntimeError, OSError) as error:
            where = f"{address.host}:{address.port}"
            found = str(error).strip().splitlines()[-1][:200]
            raise TargetError("no RPC server", where=where, expected="one with this key", found=found) from error
        self._device = self._session.cpu(0)
        self._count = 0

    def build(self, func: tirx.PrimFunc) -> RemoteFunction:
        self._count += 1
        name = f"mlcpipe_tune{self._count}.o"  # a library of a name that is loaded already would be that one
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            llvm_module(self._target, self._variant, func).write_to_file(str(path))
            self._session.upload(str(path))
        return RemoteFunction(self._session.load_module(name))

    def tensor(self, values: Array) -> Any:
        return tvm.runtime.tensor(values, self._device)

    def seconds(self, function: RemoteFunction, turns: Sequence[Sequence[Any]]) -> float:
        flush = "" if any(isinstance(value, (int, float)) for value in turns[0]) else _FLUSH
        timed = function.module.time_evaluator(KERNEL, self._device, number=1, repeat=len(turns), f_preproc=flush)
        return statistics.fmean(timed(*turns[0]).results)
