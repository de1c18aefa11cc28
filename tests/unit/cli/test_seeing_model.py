"""The embedded model that sees answers questions about pictures whose pairs of colour and kind are new to it."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("PIL", reason="pictures are drawn by Pillow")

import mlcpipe
from mlcpipe.support.resources import seeing_model_path
from tests.conftest import QUICK, linked_cache
from tests.unit.cli.conftest import ROOT, Run

LARGEST_CHECKPOINT = 8_000_000  # bytes: it is committed and shipped in the wheel
QUESTIONS, LEAST_RIGHT, GREEDY = 100, 0.9, mlcpipe.SamplingParams(temperature=0)
SHAPES = ROOT / "examples" / "shapes.png"
SEEN = "A red circle, a blue star and a black 7."


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """`pictures` and `sight_text` of apps/demo_model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "apps" / "demo_model"))
        names = ("pictures", "sight_text")
        yield importlib.import_module(names[0]), importlib.import_module(names[1])
        for name in names:
            del sys.modules[name]


def test_checkpoint_is_small_enough_to_commit() -> None:
    assert sum(p.stat().st_size for p in seeing_model_path().iterdir()) <= LARGEST_CHECKPOINT


@pytest.mark.full
def test_newcomers_see_it_work(
    mlcpipe_run: Run, scripts: tuple[ModuleType, ModuleType], shared: Path, tmp_path: Path
) -> None:
    pictures, sight_text = scripts
    cache = linked_cache(tmp_path, shared)
    options = ["--image", SHAPES, "--target", QUICK, "--prompt", "What do you see?"]
    done = mlcpipe_run("chat", *options, env={"MLCPIPE_CACHE": str(cache)})
    assert (done.returncode, done.stdout.strip()) == (0, SEEN), done.stderr

    [bundle] = (cache / "bundles").iterdir()
    rng, wrong = random.Random(4242), []
    with mlcpipe.load(bundle) as engine:
        for _ in range(QUESTIONS):
            scene = pictures.draw_scene(rng, 256, held_out=True)
            _, question, answer = sight_text.ask(rng, scene.things, held_out=True)
            content = [{"type": "image", "image": scene.image}, {"type": "text", "text": question}]
            said = engine.chat([{"role": "user", "content": content}], sampling=GREEDY, max_tokens=40).text
            if said != answer:
                wrong.append((question, answer, said))
    assert len(wrong) <= (1 - LEAST_RIGHT) * QUESTIONS, wrong
