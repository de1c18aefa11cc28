"""The fields of a quantization in config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.json_files import shown


class Settings:
    """The fields of a quantization in config.json. Each must be read or ignored: what is left is refused by name."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.where, self._values, self._name = "config.json", dict(values), name

    def take(self, field: str, default: Any = None) -> Any:
        """The raw value of a field, from now on read; `default` where it is absent or null."""
        value = self._values.pop(field, None)
        return default if value is None else value

    def choice(self, field: str, known: Iterable[Any], default: Any = None) -> Any:
        """A field that must be one of `known`, or absent if there is a default. Raises ConfigError."""
        value, choices = self.take(field, default), list(known)
        if not any(type(value) is type(one) and value == one for one in choices):
            raise self.refused(field, ", ".join(map(str, choices)), value)
        return value

    def integer(self, field: str, low: int, high: int, default: int | None = None) -> int:
        """An integer from low to high. Raises ConfigError."""
        value = self.take(field, default)
        if type(value) is not int or not low <= value <= high:
            raise self.refused(field, f"an integer from {low} to {high}", value)
        return value

    def ignore(self, *fields: str) -> None:
        """Fields that say how the numbers were found, or who reads them fast: the numbers do not depend on them."""
        for name in fields:
            self._values.pop(name, None)

    def table(self, field: str) -> Settings:
        """A field that is an object; absent or null: an empty one."""
        value = self.take(field, {})
        if not isinstance(value, Mapping):
            raise self.refused(field, "an object", value)
        return Settings(value, f"{self._name}.{field}")

    def tables(self) -> list[Settings]:
        """All fields that are left, which must be objects."""
        return [self.table(field) for field in list(self._values)]

    def overrides(self) -> dict[str, Settings | bool]:
        """The fields that are left and are objects or true or false: those of single modules."""
        flags = {name: self._values.pop(name) for name, value in list(self._values.items()) if isinstance(value, bool)}
        names = [name for name, value in self._values.items() if isinstance(value, Mapping)]
        return {**flags, **{name: self.table(name) for name in names}}

    def sizes(self, field: str, count: int) -> tuple[int, ...]:
        """A list of `count` integers from 1 to 65536. Raises ConfigError."""
        value = self.take(field)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(one) is int and 1 <= one <= 1 << 16 for one in value)
        ):
            raise self.refused(field, f"{count} integers from 1 to 65536", value)
        return tuple(value)

    @property
    def empty(self) -> bool:
        """Whether no field is left."""
        return not self._values

    def finish(self) -> None:
        """Raise ConfigError for the first field that nobody read, unless it is null, empty or false."""
        for name, value in self._values.items():
            if value not in (None, False, {}, [], ""):
                raise self.refused(name, "absent", value)

    def refused(self, field: str, expected: str, found: Any) -> ConfigError:
        """The error for a field."""
        return ConfigError(
            f"field {self._name}.{field} is not supported", where=self.where, expected=expected, found=shown(found),
            next_step="mlcpipe does not ignore fields that change the result",
        )  # fmt: skip
