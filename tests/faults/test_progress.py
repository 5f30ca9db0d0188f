"""What must not cost progress, or raise an alarm: rows 29 to 33, and ten thousand steps with nothing wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.harness import (
    FLOOR_S,
    Lab,
    check_named,
    check_nothing_left,
    check_resumes,
    check_same_losses,
    keep_for_the_table,
    noise_s,
    said,
)
from tests.faults.test_launchers import start_both, two_nodes
from tests.helpers import blocking
from tests.integration.runs import losses

pytestmark = pytest.mark.faults

SAVES_ONLY_BEFORE_VALIDATION = "exp_manager.checkpoint_callback_params.every_n_train_steps=null"


def manifest_of(lab: Lab, name: str, paths: dict[int, Path] | None = None, times: int = 1) -> Path:
    """Write the lines of a manifest of the corpus, some with other files, `times` times; return where."""
    lines = [json.loads(line) for line in (lab.corpus / f"{name}.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["audio_filepath"] = str((paths or {}).get(number, lab.corpus / line["audio_filepath"]))
    path = lab.folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) * times)
    return path


def test_row_29_a_bad_file_in_validation_is_replaced_and_named(lab: Lab) -> None:
    (lab.folder / "bad.wav").write_bytes(b"not audio at all")
    manifest = manifest_of(lab, "valid", {2: lab.folder / "bad.wav"})
    more = (f"model.validation_ds.manifest_filepath={manifest}", "model.validation_ds.max_bad_fraction=0.5")
    run = lab.start(more=more).wait()
    assert run.returncode == 0, run.stderr[-4000:]
    named = "".join(path.read_text() for path in run.run_dir.glob("bad_files_validation_ds_rank*.jsonl"))
    assert "bad.wav" in named
    assert losses(run.run_dir / "metrics.csv", "val_loss")
    keep_for_the_table(run, f"in bad_files_validation_ds_rank0.jsonl: {named.splitlines()[0]}")


@pytest.mark.parametrize("rank", [0, 1])
def test_row_29_a_death_in_validation_loses_nothing(lab: Lab, whole: Path, rank: int) -> None:
    run = lab.start(f"validation:kill {rank} 2", more=(SAVES_ONLY_BEFORE_VALIDATION,)).wait()
    check_named(run, ranks=[rank], stage="validation", within_s=3)
    trained = max(losses(run.run_dir / "metrics.csv"))
    saved = torch.load(run.run_dir / "checkpoints" / "last.ckpt", map_location="meta", weights_only=True)
    assert saved["global_step"] == trained + 1
    check_resumes(lab, run, whole)


def test_row_30_a_stop_leaves_validation_at_its_next_batch(lab: Lab, whole: Path) -> None:
    run = lab.start("slow_validation all 0", more=(SAVES_ONLY_BEFORE_VALIDATION,))
    while not run.note.exists():
        assert run.process.poll() is None, run.stderr[-4000:]
        time.sleep(0.02)
    asked = time.time()
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.ended_at - asked < 5 + noise_s()
    assert run.returncode == 75, run.stderr[-4000:]
    assert not run.incidents()
    check_nothing_left(run)
    keep_for_the_table(run, said(run, "saved and stopped after step .*"), run.ended_at - asked)
    resumed = lab.start().wait()
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    check_same_losses(run, whole)


@pytest.mark.parametrize("node", [0, 1])
def test_row_31_a_monitor_that_was_silent_and_returned_still_judges(lab: Lab, node: int) -> None:
    """Its silence, three times the limit, is a warning at most; the stall that follows is named."""
    more = ("trainer.num_nodes=2", "trainer.max_steps=100000", "trainer.check_val_every_n_epoch=100000")
    runs = start_both(lab, "slow_then_sleep 1 150", two_nodes(), *more)
    runs[0].wait_for_step(2)
    monitor = runs[0].status(node)["monitor_pid"]
    os.kill(monitor, signal.SIGSTOP)
    time.sleep(3 * FLOOR_S)
    os.kill(monitor, signal.SIGCONT)
    assert not runs[0].incidents()
    for run in runs:
        assert run.process.poll() is None, run.stderr[-4000:]
    for run in runs:
        run.wait()
        assert run.returncode == 75, run.stderr[-4000:]
        check_nothing_left(run)
    incident, runs[0].struck_at = runs[0].incident, runs[1].struck
    assert (incident["ranks"], incident["stage"]) == ([1], "encoder")
    assert runs[0].reported_s < FLOOR_S + 3 + noise_s()
    keep_for_the_table(runs[0], incident["text"], runs[0].reported_s)


def test_row_32_a_first_batch_of_many_slow_files_is_no_alarm(lab: Lab) -> None:
    """The first batch of the second epoch takes 90 s, thirty times the limit; no single file takes as long as that."""
    manifest = manifest_of(lab, "train", times=4)
    more = (
        *(f"model.train_ds.manifest_filepath={manifest}", "model.train_ds.batch_size=48", "trainer.max_steps=2"),
        *("~model.validation_ds", "exp_manager.checkpoint_callback_params.every_n_train_steps=null"),
    )
    run = lab.start("slow_second_epoch all 0", more=more).wait(timeout_s=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.ended_at - run.struck > 90
    assert not run.incidents()
    check_nothing_left(run)
    keep_for_the_table(run, "no alarm")


def test_row_32_a_file_that_blocks_among_slow_ones_is_named(lab: Lab) -> None:
    more = ("model.train_ds.batch_size=12", "trainer.max_steps=2", "~model.validation_ds")
    run = lab.start("slow_second_epoch_blocks 1 4", more=more).wait(timeout_s=300)
    incident = check_named(run, ranks=[1], stage="data", within_s=FLOOR_S + 2)
    assert incident["file"].endswith(".wav")


def test_row_33_a_file_that_blocks_is_named_with_one_rank_too(lab: Lab) -> None:
    blocks = Path(shutil.copy(next(lab.corpus.rglob("*.wav")), lab.folder / "blocks.wav"))
    manifest = manifest_of(lab, "train", {5: blocks})
    with blocking(blocks):
        run = lab.start(ranks=1, more=(f"model.train_ds.manifest_filepath={manifest}",)).wait()
    incident = run.incident
    run.struck_at = Path(incident["evidence"]).stat().st_ctime - incident["stalled_s"]
    assert check_named(run, ranks=[0], stage="data", within_s=FLOOR_S + 2)["file"] == str(blocks)


def test_row_33_a_killed_worker_is_named_with_one_rank_too(lab: Lab) -> None:
    run = lab.start("loader:kill 0 9", ranks=1, more=("model.train_ds.num_workers=1",)).wait()
    assert run.returncode == 75, run.stderr[-4000:]
    told = said(run, ".*DataLoader worker.*killed.*")
    check_nothing_left(run)
    keep_for_the_table(run, told)
    resumed = lab.start(ranks=1, more=("model.train_ds.num_workers=1",)).wait()
    assert resumed.returncode == 0, resumed.stderr[-4000:]


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A memory cgroup whose processes may use 1.5 GB in all: the folder."""
    root = Path("/sys/fs/cgroup/memory")
    version_2 = not root.is_dir()
    folder = (Path("/sys/fs/cgroup") if version_2 else root) / f"nest-test-{os.getpid()}"
    names = ("memory.max",) if version_2 else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    try:
        folder.mkdir()
        for name in names:
            if (folder / name).exists():  # the kernel may not count swap
                (folder / name).write_text("1500000000")
    except OSError:
        pytest.skip("making a memory cgroup needs root")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("ranks", [1, 2])
def test_row_33_a_rank_that_the_oom_killer_ends_is_said_to_be(lab: Lab, little_memory: Path, ranks: int) -> None:
    run = lab.start(f"uses_up_memory {ranks - 1} 4", ranks=ranks, env={"NEST_FAULT_CGROUP": str(little_memory)}).wait()
    if ranks > 1:
        incident = check_named(run, ranks=[1], stage="encoder", within_s=20)
        assert incident["kind"] == "host-memory"
        return
    assert run.returncode == -signal.SIGKILL  # nobody is left to say it; the next start in its folder does
    again = lab.start(ranks=1).wait()
    assert again.returncode == 0, again.stderr[-4000:]
    keep_for_the_table(again, said(again, ".*the last start was killed in .*"))


def test_row_24_ten_thousand_clean_steps_raise_no_alarm(lab: Lab) -> None:
    more = ("trainer.max_steps=10000", "trainer.check_val_every_n_epoch=1000", "trainer.log_every_n_steps=500")
    saves = "exp_manager.checkpoint_callback_params.every_n_train_steps=1000"
    run = lab.start(more=(*more, saves)).wait(timeout_s=1800)
    assert run.returncode == 0, run.stderr[-4000:]
    assert not run.incidents()
    assert "warning: rank" not in run.stderr
    check_nothing_left(run)
    keep_for_the_table(run, "no alarm, no warning")
