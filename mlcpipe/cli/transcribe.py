"""`mlcpipe transcribe`: files of sound to text, subtitles or JSON."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mlcpipe.cli.options import DeviceOption, QuantizationOption, TargetOption, ThreadsOption, check_at_least_one
from mlcpipe.cli.terminal import stderr_console
from mlcpipe.errors import UsageError, naming
from mlcpipe.loading import engine_device, prepare_bundle
from mlcpipe.support.defaults import AUTO, SPEECH_MODEL, TRANSCRIBE
from mlcpipe.support.progress import console_progress


class Task(Enum):
    """What is written."""

    transcribe = "transcribe"
    translate = "translate"


class Format(Enum):
    """Forms of a transcript."""

    txt = "txt"
    json = "json"
    srt = "srt"
    vtt = "vtt"
    verbose_json = "verbose_json"


def transcribe_command(
    files: Annotated[list[Path], typer.Argument(help="Files with sound: WAV, MP3, FLAC, Ogg, M4A, WebM and others.")],
    model: Annotated[
        str, typer.Option(help="hf://org/name, a checkpoint folder or a bundle of a model that hears.")
    ] = SPEECH_MODEL,
    language: Annotated[
        str | None, typer.Option(help="What is spoken: a code such as en, or a name. (default: the model detects it)")
    ] = None,
    task: Annotated[Task, typer.Option(help="translate writes English.")] = Task.transcribe,
    format: Annotated[Format, typer.Option(help="The form of the transcript.")] = Format.txt,
    prompt: Annotated[str, typer.Option(help="Text that stands before the first words: names, spelling, style.")] = "",
    temperature: Annotated[
        float, typer.Option(help="The first temperature; answers that look wrong are drawn again at higher ones.")
    ] = 0.0,
    device: DeviceOption = AUTO,
    threads: ThreadsOption = None,
    target: TargetOption = None,
    quantization: QuantizationOption = None,
) -> None:
    """Print the text of files with sound, one after the other.

    Examples:

    `mlcpipe transcribe talk.mp3`

    `mlcpipe transcribe film.m4a --model hf://openai/whisper-large-v3-turbo --language fr --format srt`

    `mlcpipe transcribe interview.wav --task translate --format verbose_json`
    """
    check_at_least_one(threads=threads)
    for file in files:
        if not file.is_file():
            raise UsageError("no file of sound", where=file, expected="a path of a file")
    from mlcpipe import SpeechParams, Transcriber
    from mlcpipe.runtime.speech.decoding import rising
    from mlcpipe.sound.decode import EXTRA
    from mlcpipe.support.pyav import require_pyav

    params = SpeechParams(language=language, task=task.value, prompt=prompt, temperatures=rising(temperature))
    require_pyav(*EXTRA)
    console = stderr_console()
    with console_progress(console, lasting=False) as progress:
        bundle = prepare_bundle(model, device, quantization, target=target, task=TRANSCRIBE, progress=progress)
        with naming(model, bundle):
            transcriber = Transcriber(bundle, device=engine_device(device), threads=threads, progress=progress)
        from mlcpipe.runtime.speech.formats import FORMATS

        for file in files:
            made = FORMATS[format.value](transcriber.transcribe(file, params, progress=progress))
            progress.finish()
            sys.stdout.write(made)
            sys.stdout.flush()
