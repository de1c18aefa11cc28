"""What clients may get again: in memory, as much as fits, each owner's own."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from mlcpipe.server.errors import ApiError

_MEMORY = 4  # times its JSON that a text takes, about
_ITEM_BYTES, _VALUE_BYTES = 512, 100  # of memory, about, that an item takes with its id, and a value
Items = list[dict[str, Any]]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes of memory."""


_T = TypeVar("_T", bound=_Sized)


def memory_of(json_bytes: int, items: int, values: int = 0) -> int:
    """Bytes of memory, about, of so many items with `json_bytes` as JSON and so many `values`."""
    return _MEMORY * json_bytes + _ITEM_BYTES * items + _VALUE_BYTES * values


class OwnedStore(Generic[_T]):
    """Things by owner and id. All methods run in the event loop.

    Where room lacks, the owner who has most loses what was used longest ago, so that none can flush the others'.
    `kind` names a value in errors, `lost` says why it may be gone.
    """

    kind: ClassVar[str]
    lost: ClassVar[str]

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self.most_bytes = most, most_bytes
        self._kept: OrderedDict[tuple[str, str], _T] = OrderedDict()
        self._nbytes: Counter[str] = Counter()  # by owner
        self._counts: Counter[str] = Counter()

    def put(self, owner: str, name: str, value: _T) -> bool:
        """Keep a value, in the place of an older one of this name; others leave. False for one that is too large."""
        if value.nbytes > self.most_bytes:
            return False
        if (owner, name) in self._kept:
            self._drop((owner, name))
        self._kept[owner, name] = value
        self._nbytes[owner] += value.nbytes
        self._counts[owner] += 1
        self._make_room()
        return True

    def found(self, owner: str, name: str) -> _T | None:
        """A value, which is used now; None for one that is not kept."""
        value = self._kept.get((owner, name))
        if value is not None:
            self._kept.move_to_end((owner, name))
        return value

    def get(self, owner: str, name: str, param: str | None = None) -> _T:
        """Raises ApiError for one that is not kept."""
        found = self.found(owner, name)
        if found is None:
            message = f"there is no {self.kind} {name[:100]!r}: {self.lost}"
            raise ApiError(404, message, code=f"{self.kind}_not_found", param=param)
        return found

    def delete(self, owner: str, name: str) -> None:
        """Forget a value. Raises ApiError for one that is not kept."""
        self.get(owner, name)
        self._drop((owner, name))

    def _make_room(self) -> None:
        while (many := self._counts.total() > self._most) or self._nbytes.total() > self.most_bytes:
            ((richest, _),) = (self._counts if many else self._nbytes).most_common(1)
            self._drop((richest, self._oldest(richest)))

    def _oldest(self, owner: str) -> str:
        return next(name for one, name in self._kept if one == owner)

    def _drop(self, place: tuple[str, str]) -> None:
        self._nbytes[place[0]] -= self._kept.pop(place).nbytes
        self._counts[place[0]] -= 1
