"""What was trained is saved before anything can go wrong in a validation."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nest_ssl.fast.engine import Engine
from nest_ssl.training import saving
from tests.integration.runs import PROGRAM, arguments, losses, run, run_here

SLOW_VALIDATION = """
import sys, time
from pathlib import Path
from nest_ssl.fast.engine import Engine
real = Engine.evaluate
def slow(self, batch):
    Path(sys.argv[1]).touch()
    time.sleep(1.0)
    return real(self, batch)
Engine.evaluate = slow
from nest_ssl.cli.main import main
main(["pretrain", *sys.argv[2:]])
"""
NOTHING_ELSE_SAVES = "exp_manager.checkpoint_callback_params.every_n_train_steps=null"


def saved(path: Path) -> tuple[int, bool]:
    content = torch.load(path, weights_only=True)
    return content["global_step"], content["progress"]["validation_is_due"]


def test_a_validation_that_fails_loses_no_training(corpus: Path, tmp_path: Path) -> None:
    lines = (corpus / "valid.jsonl").read_text().splitlines(keepends=True)
    for number in range(len(lines)):
        (tmp_path / f"{number}.wav").write_bytes(b"no audio")
    broken = "".join(f'{{"audio_filepath": "{number}.wav", "duration": 1.2}}\n' for number in range(len(lines)))
    (tmp_path / "broken.jsonl").write_text(broken)
    bad = f"model.validation_ds.manifest_filepath={tmp_path / 'broken.jsonl'}"
    failed = run(arguments(corpus, tmp_path, "run", NOTHING_ELSE_SAVES, bad))
    assert failed.returncode == 1
    assert saved(tmp_path / "run" / "checkpoints" / "last.ckpt") == (6, True)
    done = run(arguments(corpus, tmp_path, "run", NOTHING_ELSE_SAVES))
    assert done.returncode == 0, done.stderr[-3000:]
    whole = run(arguments(corpus, tmp_path, "whole", NOTHING_ELSE_SAVES))
    assert whole.returncode == 0, whole.stderr[-3000:]
    for column in ("train_loss", "val_loss", "train_loss_epoch"):
        assert losses(tmp_path / "run" / "metrics.csv", column) == losses(tmp_path / "whole" / "metrics.csv", column)


def test_a_validation_begins_when_the_checkpoint_before_it_is_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death at its very start, out of memory say, would else take the checkpoint with it, time after time."""
    last, found = tmp_path / "run" / "checkpoints" / "last.ckpt", []
    write, evaluate = saving._write_file, Engine.evaluate

    def slow_write(*args: Any, **options: Any) -> None:
        time.sleep(1.0)
        write(*args, **options)

    def look(engine: Engine, batch: Any) -> Any:
        found.append(last.exists() and saved(last))
        return evaluate(engine, batch)

    monkeypatch.setattr(saving, "_write_file", slow_write)
    monkeypatch.setattr(Engine, "evaluate", look)
    more = ("trainer.max_steps=6", "trainer.num_sanity_val_steps=0")
    run_here(arguments(corpus, tmp_path, "run", NOTHING_ELSE_SAVES, *more))
    assert set(found) == {(6, True)}


def test_a_stop_leaves_a_validation_at_its_next_batch(corpus: Path, tmp_path: Path) -> None:
    lines = (corpus / "valid.jsonl").read_text()
    (corpus / "long.jsonl").write_text(lines * 10)  # 20 batches of a second each
    note = tmp_path / "validates"
    data = (f"model.validation_ds.manifest_filepath={corpus / 'long.jsonl'}", "model.validation_ds.batch_size=4")
    args = arguments(corpus, tmp_path, "run", NOTHING_ELSE_SAVES, *data, "trainer.max_steps=8")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_VALIDATION, str(note), *args], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not note.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr[-3000:]
    assert time.monotonic() - asked < 10
    assert "saved and stopped after step 6" in stderr
    assert saved(tmp_path / "run" / "checkpoints" / "last.ckpt") == (6, True)
    done = subprocess.run([*PROGRAM, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(losses(tmp_path / "run" / "metrics.csv", "val_loss")) == [5]
    assert saved(tmp_path / "run" / "checkpoints" / "last.ckpt") == (8, False)


def test_a_validation_that_has_been_done_is_not_repeated(corpus: Path, tmp_path: Path) -> None:
    for steps in (6, 8):
        done = run(arguments(corpus, tmp_path, "run", NOTHING_ELSE_SAVES, f"trainer.max_steps={steps}"))
        assert done.returncode == 0, done.stderr[-3000:]
        assert saved(tmp_path / "run" / "checkpoints" / "last.ckpt") == (steps, False)
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    place = rows[0].split(",").index("val_loss")
    assert [row.split(",")[0] for row in rows[1:] if row.split(",")[place]] == ["5"]


def test_a_run_killed_in_its_last_validation_ends_like_a_whole_one(corpus: Path, tmp_path: Path) -> None:
    args = arguments(corpus, tmp_path, "run", NOTHING_ELSE_SAVES, "trainer.max_steps=6")
    kill = "import os, signal\nfrom nest_ssl.training.validation import Validation\n"
    kill += "Validation._metrics = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    program = kill + "import sys\nfrom nest_ssl.cli.main import main\nmain(['pretrain', *sys.argv[1:]])"
    killed = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    for name in ("run", "whole", "run"):  # the last time there is nothing left to do
        done = run(arguments(corpus, tmp_path, name, NOTHING_ELSE_SAVES, "trainer.max_steps=6"))
        assert done.returncode == 0, done.stderr[-3000:]
    rows = [(tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("run", "whole")]
    assert len(rows[0]) == len(rows[1])  # nothing is missing, nothing is there twice
    for column in ("train_loss", "val_loss", "train_loss_epoch"):
        assert losses(tmp_path / "run" / "metrics.csv", column) == losses(tmp_path / "whole" / "metrics.csv", column)
        assert losses(tmp_path / "run" / "metrics.csv", column)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ("d_model=64", r"Changed since then: model\.encoder\.d_model"),
        ("gone.jsonl", r"gone\.jsonl: no such manifest"),
        ("unreadable.jsonl", r"1\.gone: No such file"),
    ],
)
def test_a_refused_command_changes_nothing_in_the_folder(
    corpus: Path, tmp_path: Path, refused: str, words: str
) -> None:
    args = arguments(corpus, tmp_path, "run", "~model.validation_ds", "trainer.max_steps=2")
    run_here(args)
    (tmp_path / "unreadable.jsonl").write_text((corpus / "train.jsonl").read_text().replace(".wav", ".gone"))
    manifest = f"model.train_ds.manifest_filepath={tmp_path / refused}"
    refused = manifest if refused.endswith("jsonl") else f"model.encoder.{refused}"

    def content() -> dict[Path, bytes]:
        files = (path for path in (tmp_path / "run").rglob("*") if path.is_file() and not path.name.startswith("log_"))
        return {path: path.read_bytes() for path in files}

    (tmp_path / "run" / ".lock").write_text("process 1 on a machine\n")
    with (tmp_path / "run" / "metrics.csv").open("a") as file:
        file.write("2,1700000000.0,4.5\r\n")  # logged after the last checkpoint
    before = content()
    with pytest.raises((ValueError, RuntimeError, OSError), match=words):
        run_here([*args, refused, "trainer.max_steps=4"])
    assert content() == before


def test_a_run_with_a_damaged_last_checkpoint_resumes_from_the_one_before_to_the_same_losses(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(corpus, tmp_path, "run", "~model.validation_ds", "trainer.max_steps=7")
    run_folder = run_here(args)
    whole = losses(run_folder / "metrics.csv")
    last = run_folder / "checkpoints" / "last.ckpt"
    data = bytearray(last.read_bytes())
    weight = torch.load(last, weights_only=True)["state_dict"]["encoder.layers.0.norm_out.weight"]
    data[data.index(weight.numpy().tobytes())] ^= 1
    last.write_bytes(data)
    caplog.set_level("INFO")
    run_here(args)
    assert "last.ckpt: is damaged: " in caplog.text
    assert "resumed at step 6 from last-before.ckpt" in caplog.text
    assert losses(run_folder / "metrics.csv") == whole
    assert saved(last)[0] == 7
    for path in last.parent.glob("*.ckpt"):
        path.unlink()
    with pytest.raises(ValueError, match="has saved a checkpoint of step 7, and none can be resumed now"):
        run_here(args)
