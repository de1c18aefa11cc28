"""Options that several verbs share, each with its one help text; the sampling options come from the table of `/set`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from mlcpipe.cli.chat.settings import KNOBS, Knob, Settings
from mlcpipe.errors import UsageError
from mlcpipe.support.defaults import DEFAULT_QUANTIZATION, FOLD_BY_WEIGHTS, GPTQ, KEEP, NO_CALIBRATION, OWN_CALIBRATION
from mlcpipe.support.files import local_path

Options = TypeVar("Options")

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="hf://org/name, a checkpoint folder, a GGUF file or a bundle; the demo model if left out."),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        help="A checkpoint folder, a GGUF file, hf://org/name[@revision], hf://org/name:TAG for one of its GGUF files, "
        "or ollama://name[:tag]."
    ),
]
TARGET_HELP = "What to compile for: a target that `mlcpipe doctor` lists, or your own board.toml."
TargetOption = Annotated[str | None, typer.Option(help=f"{TARGET_HELP} (default: what suits the device)")]
CompileTargetOption = Annotated[str, typer.Option(help=TARGET_HELP)]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        help="How to store the weights: q3f16_1, q4f16_1, q4f16_m, q8f16_1, q0f16 and others; a recipe.toml that "
        "`mlcpipe inspect` wrote; keep, as the checkpoint has them; or auto: the default, for webgpu with a library "
        "for GPUs with float16 added. "
        f"(default: {DEFAULT_QUANTIZATION}; {KEEP} for a quantized checkpoint)"
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help="How to choose the numbers of a quantization: search, the scales of least error; awq and gptq, better "
        "and in minutes; rtn, as MLC-LLM does. (default: search for 3 and 4 bits)"
    ),
]
BestOption = Annotated[
    bool,
    typer.Option(
        "--best",
        help="Quantize as well as the bits allow: --method gptq, in minutes. It says beforehand how many.",
    ),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        help="A text file that shows search, awq or gptq where errors matter: the model runs on it while "
        f"weights are quantized. {OWN_CALIBRATION} is the built-in text, the default of awq and gptq. "
        f"(default: {NO_CALIBRATION})"
    ),
]
FoldOutliersOption = Annotated[
    str | None,
    typer.Option(
        "--fold-outliers",
        help="Fold large channels of activations into the matrices before, so that rounding loses less: "
        f"{FOLD_BY_WEIGHTS} finds them by the weights alone; a text file, or {OWN_CALIBRATION}, by the activations "
        f"on it. (default: {NO_CALIBRATION})",
        metavar="TEXT",
    ),
]
BitsOption = Annotated[
    float | None,
    typer.Option(help="Give each matrix the bits that help most, with this average per weight at most, such as 4.8."),
]
BitsTextOption = Annotated[
    str | None,
    typer.Option(
        help="What --bits-per-weight measures on: the end of a text in UTF-8; or none, which guesses. "
        "(default: the text of --calibration own)"
    ),
]
KvCacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        help="How to keep the keys and values: auto, f16, f32, q8 in half the memory, or q4 in a quarter. "
        "(default: the quantization's)"
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="Where to run: cpu, vulkan (the best GPU), vulkan:1 (the next), cuda or metal; auto is the device that a "
        "bundle was compiled for, and for a checkpoint a GPU that holds it and is clearly faster, else the CPU, or "
        "both. vulkan,cpu cuts a checkpoint into stages: docs/stages.md."
    ),
]
StagesOption = Annotated[
    str | None,
    typer.Option(
        metavar="N,M",
        help="With several devices or targets, as in vulkan,cpu: how many layers each gets; 48,8e leaves the experts "
        "of the last 8 of 48 layers to the last device. (default: as many as fit on the fastest, the rest on the "
        "others; of a mixture of experts all layers on the fastest, with the experts of as many as fit)",
    ),
]
DeviceMemoryOption = Annotated[
    int | None,
    typer.Option(
        help="With several devices: bytes that layers on a GPU are planned to take. (default: what is free there)",
        min=1,
    ),
]
ContextOption = Annotated[int | None, typer.Option(help="The longest chat, in tokens. (default: the model's)")]
ContextShiftOption = Annotated[
    bool,
    typer.Option(
        "--context-shift",
        help="Continue when the context is full: keep its first 16 tokens and its last half, forget the rest.",
    ),
]
PictureRowsOption = Annotated[
    int | None,
    typer.Option(
        help="Rows of the largest picture, each in the place of a token, of models that take pictures of any size; "
        "larger ones are shrunk. (default: 2048)"
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads of the CPU kernels. (default: the physical cores; decode may take fewer)")
]
DraftHeadOption = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="An EAGLE-3 head, Medusa heads or an assistant of Gemma 4, made for the model: they draft its answers "
        "when that is faster; answers do not change. A checkpoint that has a layer for this needs none; `none` leaves "
        "that out.",
    ),
]
MmprojOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The mmproj file of a GGUF model that sees. (default: the one in the model's folder; `none`: text alone)",
    ),
]
AdapterOption = Annotated[Path | None, typer.Option(help="A folder with a LoRA adapter that PEFT saved.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the output folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def stages_of(text: str | None) -> tuple[int, ...] | None:
    """The numbers of --stages. Raises UsageError."""
    from mlcpipe.bundle.stages import counts_of  # needs pydantic

    return None if text is None else counts_of(text)


def bundle_folder(text: str) -> Path:
    """Parses the argument of verbs that only take bundles. Raises UsageError for a name of the hub."""
    path = local_path(text)
    if path is None:
        raise UsageError("a bundle is a folder", found=text, next_step="make one with: mlcpipe compile")
    return path


def method_of_best(best: bool, method: str | None) -> str | None:
    """The method of --best and --method. Raises UsageError for both."""
    if best and method is not None:
        raise UsageError("--best and --method both choose the method", found=method, next_step="leave one out")
    return GPTQ if best else method


def check_at_least_one(**options: int | None) -> None:
    """Raise UsageError for an option, by its name without dashes, that is not an integer >= 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')}", expected="an integer >= 1", found=value)


def option_name(key: str) -> str:
    """The option of one of KNOBS: `--top-p` of "top_p"."""
    return f"--{key.replace('_', '-')}"


def _declared(key: str, knob: Knob) -> str:
    name = option_name(key)
    return f"{name}/--no-{name[2:]}" if knob.kind is bool else name


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each of KNOBS, instead of its parameter `sampling: dict[str, float]`.

    The command gets the options that were given, by key.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    at = next(i for i, parameter in enumerate(own) if parameter.name == "sampling")
    made = [_sampling_parameter(key, knob) for key, knob in KNOBS.items()]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {key: values.pop(key) for key in KNOBS}
        command(**values, sampling={key: value for key, value in given.items() if value is not None})

    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in [*own[:at], *made, *own[at + 1 :]]]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def from_fields(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Give a command that takes a dataclass an option for each of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)  # type: ignore[arg-type]
    ]

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(kind(**values))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _sampling_parameter(key: str, knob: Knob) -> inspect.Parameter:
    default = Settings().values()[key]
    text = f"{knob.help[0].upper()}{knob.help[1:]}." + (
        "" if default is None else f" (default: the model's, else {default:g})"
    )
    option = typer.Option(None, _declared(key, knob), help=text, rich_help_panel="Sampling")
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=knob.kind | None)
