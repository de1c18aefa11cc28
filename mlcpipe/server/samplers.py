"""llama-server's `samplers`: those that it leaves out are off, whatever their fields say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.server.errors import ApiError

# The values of fields whose sampler is off.
_OFF: Mapping[str, Mapping[str, float | None]] = {
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "typ_p": {"typical_p": None},
    "xtc": {"xtc_probability": None},
    "top_n_sigma": {"top_n_sigma": None},
    "dry": {"dry_multiplier": None},
}
_SAME = {"typical_p": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p"}
_INFILL_MIN_P = 0.2  # `infill` drops tokens below this probability: the nearest that is offered


def sampled(fields: Mapping[str, Any], samplers: Any) -> dict[str, Any]:
    """Values for the fields of samplers that are off. Raises ApiError for a sampler that there is not."""
    if not isinstance(samplers, list):
        if samplers in (None, ""):
            return {}
        raise ApiError(400, "samplers: expected a list of their names", param="samplers")
    named = [_SAME.get(one, one) if isinstance(one, str) else one for one in samplers]
    for one in named:
        if one != "infill" and (not isinstance(one, str) or one not in _OFF):
            message = f"samplers: {str(one)[:40]!r} is not offered; expected of {', '.join((*_OFF, 'infill'))}"
            raise ApiError(400, message, param="samplers", code="unsupported_parameter")
    off: dict[str, Any] = {}
    for name, values in _OFF.items():
        if name not in named:
            off |= values
    if "infill" in named:
        given = fields.get("min_p") if "min_p" in named else None
        if given is None or (isinstance(given, (int, float)) and given < _INFILL_MIN_P):
            off["min_p"] = _INFILL_MIN_P
        else:
            off.pop("min_p", None)
    return off


def with_samplers(data: Any) -> Any:
    """A body of a chat with `samplers` and `n_predict`, which llama-server has there too, as fields of ours."""
    if not isinstance(data, dict) or not {"samplers", "n_predict"} & data.keys():
        return data
    made = {name: value for name, value in data.items() if name not in ("samplers", "n_predict")}
    if (most := data.get("n_predict")) is not None and made.get("max_tokens") is None:
        made["max_tokens"] = -1 if most == -2 else most  # -2: until the context is full
    return made | sampled(data, data.get("samplers"))
