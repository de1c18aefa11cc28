"""Scales of LoRA adapters, as llama-server has them: `lora` of a request, and those that `/lora-adapters` sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from mlcpipe.errors import MlcpipeError, ResourceError
from mlcpipe.runtime.serving.adapters import Adapter, PackedAdapter, scaled
from mlcpipe.runtime.serving.interface import Request, ServingEngine
from mlcpipe.server.errors import ApiError, refused

if TYPE_CHECKING:
    from mlcpipe.server.bodies import LoraScale, SamplingFields

_T = TypeVar("_T")


class Adapted(Protocol):
    """What a service is here: its engine, its adapters by name, and their scales."""

    engine: ServingEngine
    adapters: dict[str, Adapter]
    lora: LoraScales

    async def apart(self, work: Callable[[], _T], nbytes: int = 0) -> _T:
        """As `OffLoop.apart`."""


class LoraScales:
    """The scales that requests have which say nothing, of each client, and adapters that were loaded for other scales
    than 1.

    Those that are not used leave when there is no room for another one. Made and used in the event loop.
    """

    def __init__(self) -> None:
        self._defaults: dict[str, Mapping[str, float]] = {}  # by `Body.client`, and by name; others have 0
        self._made: dict[tuple[int, float], Adapter] = {}  # by the serial of the adapter, the latest used one last
        self._loading = asyncio.Lock()

    def defaults(self, client: str) -> Mapping[str, float]:
        """The scales that a client has set."""
        return self._defaults.get(client, {})

    def set_defaults(self, client: str, scales: Mapping[str, float]) -> None:
        """Set the scales of a client's requests; others keep theirs."""
        self._defaults[client] = scales

    async def adapter(self, service: Adapted, name: str, scale: float) -> Adapter:
        """The adapter of a name with a scale, which is loaded if necessary. Raises ApiError."""
        own = service.adapters[name]
        if scale == 1:
            return own
        async with self._loading:
            found = self._made.pop((own.serial, scale), None)
            if found is None:
                packed = await service.apart(partial(service.engine.read_adapter, own.path, name))
                found = await self.load(service, await service.apart(partial(scaled, packed, scale)))
            self._made[own.serial, scale] = found
        return found

    async def load(self, service: Adapted, packed: PackedAdapter) -> Adapter:
        """Load an adapter, in the place of those that nobody uses if there is no other. Raises ApiError."""
        while True:
            try:
                return await asyncio.wrap_future(service.engine.load_adapter(packed))
            except ResourceError as error:
                unused = next((key for key, one in self._made.items() if not one.users), None)
                if unused is None:
                    raise refused(error) from None
                service.engine.unload_adapter(self._made.pop(unused))
            except MlcpipeError as error:
                raise refused(error) from None

    def forget(self, service: Adapted, name: str, serial: int) -> None:
        """Unload what was loaded of an adapter that is unloaded."""
        for client, scales in self._defaults.items():
            self._defaults[client] = {other: scale for other, scale in scales.items() if other != name}
        for key in [key for key in self._made if key[0] == serial]:
            service.engine.unload_adapter(self._made.pop(key))


def scales_of(service: Adapted, given: list[LoraScale], where: str) -> dict[str, float]:
    """The scale of each named adapter, whose ids are their places in `/lora-adapters`. Raises ApiError."""
    names, scales = list(service.adapters), dict[str, float]()
    for one in given:
        if one.id >= len(names):
            known = (
                f"ids from 0 to {len(names) - 1}" if names else "none: the server has no adapters; see serve --adapter"
            )
            raise ApiError(400, f"{where}: expected {known}, found {one.id}", param=where)
        if names[one.id] in scales:
            raise ApiError(400, f"{where}: the adapter {one.id} is there twice", param=where)
        scales[names[one.id]] = one.scale
    active = [name for name, scale in scales.items() if scale]
    if len(active) > 1:
        message = f"{where}: expected one adapter with a scale that is not 0, found {len(active)}; choose one"
        raise ApiError(400, message, param=where, code="unsupported_parameter")
    return scales


async def with_scales(service: Adapted, body: SamplingFields, request: Request) -> Request:
    """The request with the adapter of its `lora`, or of its client's default. Raises ApiError."""
    scales = service.lora.defaults(body.client)
    if body.lora is None and (request.adapter is not None or not scales):
        return request
    if body.lora is not None:
        scales = scales_of(service, body.lora, "lora")
        if body.lora and request.adapter is not None:
            raise ApiError(400, "lora: not together with a model that is an adapter; leave one out", param="lora")
        if request.adapter is not None:
            return request
    name = next((name for name, scale in scales.items() if scale and name in service.adapters), None)
    if name is None:
        return request
    return replace(request, adapter=await service.lora.adapter(service, name, scales[name]))
