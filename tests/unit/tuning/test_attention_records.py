"""A record of an attention kernel on its way: found by `tune`, applied by `compile`, shown by `inspect --kernels`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe import compile
from mlcpipe.cli import main
from mlcpipe.support.env import env
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.tuned import records as records_module
from mlcpipe.tuned.local_records import device_of
from mlcpipe.tuning.tasks import Task, lower, model_of, tasks_of
from tests.conftest import TinyLlama, write_llama
from tests.unit.tuning.records import record
from tir_schedules.op import op_of

TARGET = load_target("cpu-native")
(VARIANT,) = compiled_variants(TARGET)


def attention_tasks(model: Path) -> dict[str, Task]:
    tasks = tasks_of(lower(model_of(model, "q0f32"), TARGET), VARIANT)
    return {op_of(task.func).kind: task for task in tasks if task.space.family == "attention"}


@pytest.mark.full
def test_a_record_of_attention_is_applied_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_llama(tmp_path / "model", TinyLlama(layers=2))
    tasks = attention_tasks(model)
    assert set(tasks) == {"attend_few", "attend_many"}
    assert {task.uses for task in tasks.values()} == {2} and tasks["attend_few"].space.rows == 1
    one = tasks["attend_few"]
    choice = next(choice for choice in one.space.choices() if choice != one.space.default)
    kept = record(
        kernel=one.kernel, name=one.name, rule=one.rule, bucket=one.space.bucket, variant=VARIANT.name,
        device=device_of(TARGET), knobs=choice,
    )  # fmt: skip
    monkeypatch.setattr(records_module, "tuned_path", lambda: tmp_path / "site" / "tir_schedules" / "tuned")
    records_module.write_records(records_module.files_of(TARGET, env().cache_dir)[0], [kept])
    bundle = compile(model, target="cpu-native", quantization="q0f32", output=tmp_path / "bundle")
    assert main(["inspect", str(bundle), "--kernels", "--json"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(kept.title) == 1 and f'"{one.rule}"' in shown
