from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nest_ssl.config import CheckpointConfig, ExperimentConfig
from nest_ssl.run_folder import (
    BEFORE,
    LAST,
    MetricsWriter,
    RunFolder,
    forget_after,
    given_ranks_per_node,
    listed_devices,
    logged_at,
    ranks_per_node,
    read_columns,
    read_rows,
)
from tests.helpers import fifo_that_is_not_opened


def no_gpus_wanted() -> int:
    raise AssertionError("GPUs were counted")


@pytest.mark.parametrize(
    ("devices", "ranks"), [(4, 4), ("4", 4), ("0,1", 2), ("3,", 1), ("0, 2,5", 3), ([0, 2], 2), ([7], 1), ([0, 0], 2)]
)
def test_a_count_and_a_list_of_devices_mean_as_many_ranks(devices: Any, ranks: int) -> None:
    for accelerator in ("auto", "gpu"):
        assert ranks_per_node(devices, accelerator, lambda: 8) == ranks
    assert given_ranks_per_node(devices) == ranks


@pytest.mark.parametrize("devices", [4, "4", "0,1", [0, 1, 2]])
def test_a_count_means_as_many_ranks_on_any_machine(devices: Any) -> None:
    for accelerator in ("auto", "cpu", "gpu"):
        assert ranks_per_node(devices, accelerator, no_gpus_wanted) == given_ranks_per_node(devices)


@pytest.mark.parametrize(("devices", "count"), [("2,3", 2), ([0, 0], 2), ([5], 1), ([1, 0], 2)])
def test_a_machine_without_gpus_has_none_to_choose_from(devices: Any, count: int) -> None:
    for accelerator in ("auto", "cpu"):
        with pytest.raises(ValueError, match=rf"trainer\.devices=.* there is none. Use trainer\.devices={count}"):
            ranks_per_node(devices, accelerator, lambda: 0)


@pytest.mark.parametrize("devices", [-1, "-1", "auto"])
def test_all_devices_are_as_many_ranks_as_gpus_and_one_on_a_cpu(devices: Any) -> None:
    assert ranks_per_node(devices, "gpu", lambda: 8) == 8
    assert ranks_per_node(devices, "auto", lambda: 0) == 1
    assert ranks_per_node(devices, "cpu", no_gpus_wanted) == 1
    assert given_ranks_per_node(devices) is None


@pytest.mark.parametrize("devices", [0, -2, "-2", "abc", "1,x", [], [-1], ["a"], None, ","])
def test_devices_that_mean_nothing_are_refused_by_name(devices: Any) -> None:
    with pytest.raises(ValueError, match=r"trainer\.devices=.*Use a count"):
        ranks_per_node(devices, "auto", lambda: 8)


def test_listed_devices_are_those_numbers() -> None:
    assert listed_devices("2,0") == [2, 0]
    assert listed_devices([1, 3]) == [1, 3]
    assert listed_devices(4) is None
    assert listed_devices("auto") is None


def test_a_row_is_on_disk_when_it_is_written_and_new_columns_join_the_old(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = MetricsWriter(path)
    writer.write({"train_loss": 4.5, "epoch": 0}, 0)
    assert read_columns(path) == ["step", "time", "train_loss"]
    writer.write({"val_loss": 4.25}, 0)
    writer.write({"train_loss": 4.0}, 1)
    assert read_columns(path) == ["step", "time", "train_loss", "val_loss"]
    rows = [(row["step"], row["train_loss"], row["val_loss"]) for row in read_rows(path)]
    assert rows == [("0", "4.5", ""), ("0", "", "4.25"), ("1", "4.0", "")]
    assert writer.latest == {"train_loss": 4.0, "val_loss": 4.25, "epoch": 0}


def test_a_metric_with_line_ends_in_its_name_is_one_column(tmp_path: Path) -> None:
    for step in range(2):
        MetricsWriter(tmp_path / "metrics.csv").write({"val_a\rb\nc": 1.0}, step)
    assert read_columns(tmp_path / "metrics.csv") == ["step", "time", "val_a b\nc"]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == ["0", "1"]


def test_a_resumed_run_keeps_the_columns_and_the_rows_before_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsWriter(path)
    for step in range(4):
        first.write({"b": step, "a": -step}, step)
    forget_after(path, 2)
    MetricsWriter(path).write({"a": 7}, 2)
    assert read_columns(path) == ["step", "time", "b", "a"]
    assert [(row["step"], row["b"], row["a"]) for row in read_rows(path)] == [
        ("0", "0", "0"),
        ("1", "1", "-1"),
        ("2", "", "7"),
    ]
    text = path.read_bytes()
    forget_after(path, 3)
    assert path.read_bytes() == text
    forget_after(tmp_path / "none.csv", 3)
    assert not (tmp_path / "none.csv").exists()


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\0\0\0\n", b"1\xff,\xfe,4\r\n", b"x\r\n", b"nan,1,2,3,4,5\r\n", b"3.5", b"1"]
)
def test_a_damaged_row_does_not_prevent_a_resume(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.csv"
    writer = MetricsWriter(path)
    for step in range(2):
        writer.write({"train_loss": 4.0}, step)
    path.write_bytes(path.read_bytes() + damage)
    forget_after(path, 2)
    MetricsWriter(path).write({"train_loss": 3.0, "new": 1.0}, 2)
    assert [row["step"] for row in read_rows(path)] == ["0", "1", "2"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.csv")
    writer.write({"a": 1.0}, 0)
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(OSError, match=r"metrics\.csv: cannot be written: it is not a file"):
        writer.write({"a": 1.0}, 1)


def test_a_pipe_in_place_of_the_metrics_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.csv")
    with pytest.raises(OSError, match=r"metrics\.csv: cannot be written: it is not a file"):
        MetricsWriter(tmp_path / "metrics.csv").write({"a": 1.0}, 0)


def make(path: Path, time_s: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    os.utime(path, (time_s, time_s))
    return path


def test_the_newest_checkpoint_is_a_ckpt_and_the_newest_weights_may_be_a_nemo(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest_checkpoint() is None
    ckpt, nemo = make(folder.checkpoints / "a.ckpt", 1000), make(folder.checkpoints / "a.nemo", 1000)
    assert folder.newest_checkpoint() == ckpt
    assert folder.newest_weights() == nemo
    assert folder.newest_checkpoint() == ckpt
    last = make(folder.last_checkpoint, 1000)
    assert folder.newest_checkpoint() == last
    newer = make(folder.checkpoints / "b.ckpt", 2000)
    assert folder.newest_checkpoint() == folder.newest_weights() == newer


def test_a_folder_of_shards_is_a_checkpoint_once_it_is_complete(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    older = make(folder.checkpoints / "older.ckpt", 1000)
    make(folder.last_checkpoint / ".metadata", 3000)
    assert folder.newest_checkpoint() == older
    make(folder.last_checkpoint / "rest.pt", 2000)
    assert folder.newest_checkpoint() == folder.last_checkpoint
    resumed = folder.checkpoint_to_resume(ExperimentConfig(resume_if_exists=True))
    assert resumed == folder.last_checkpoint


def test_checkpoints_in_another_folder_are_found_through_hparams(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    assert RunFolder.open(run) == RunFolder(run)
    (run / "hparams.yaml").write_text("exp_manager: [")
    assert RunFolder.open(run) == RunFolder(run)
    (run / "hparams.yaml").write_text(f"exp_manager: {{checkpoint_callback_params: {{dirpath: {elsewhere}}}}}")
    folder = RunFolder.open(run)
    assert folder.checkpoints == elsewhere
    assert folder.nemo_file(CheckpointConfig()) == elsewhere / "run.nemo"
    assert folder.nemo_file(CheckpointConfig(prefix="best", postfix="-x.nemo")) == elsewhere / "best-x.nemo"


def test_a_run_is_resumed_from_last_unless_another_file_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    resume = ExperimentConfig(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    said: list[str] = []
    assert folder.checkpoint_to_resume(resume, say=said.append) is None
    assert said == []
    make(folder.metrics_csv, 500)
    assert folder.checkpoint_to_resume(resume, say=said.append) is None
    assert said == [f"{tmp_path}: has results of an earlier start, but no checkpoint: starting from step 0."]
    with pytest.raises(ValueError, match="there is no checkpoint to resume from"):
        folder.checkpoint_to_resume(ExperimentConfig(resume_if_exists=True))
    best = make(folder.checkpoints / "best.ckpt", 2000)
    assert folder.checkpoint_to_resume(resume) == best
    make(folder.checkpoints / LAST, 1000)
    assert folder.checkpoint_to_resume(resume) == folder.last_checkpoint
    assert folder.checkpoint_to_resume(ExperimentConfig()) is None
    assert folder.checkpoint_to_resume(ExperimentConfig(resume_from_checkpoint=str(best))) == best
    with pytest.raises(ValueError, match=r"resume_from_checkpoint: .*gone\.ckpt: no such file"):
        folder.checkpoint_to_resume(ExperimentConfig(resume_from_checkpoint=str(tmp_path / "gone.ckpt")))


@pytest.mark.parametrize("name", [".lock", ".saved", "hparams.yaml", "git-commit.txt", "watchdog", "incidents"])
@pytest.mark.parametrize("resumes", [True, False])
def test_what_stands_in_the_way_of_the_runs_own_files_is_named_before_anything_is_written(
    tmp_path: Path, name: str, resumes: bool
) -> None:
    make(tmp_path / "checkpoints" / LAST, 1000)
    path, exp = tmp_path / name, ExperimentConfig(resume_if_exists=resumes)
    needs_folder = name in ("watchdog", "incidents")
    path.write_text("") if needs_folder else path.mkdir()
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: is (a|not a) folder, .*Move it away or delete it"):
        RunFolder(tmp_path).checkpoint_to_resume(exp)
    path.unlink() if needs_folder else path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: is not .*Move it away or delete it"):
        RunFolder(tmp_path).checkpoint_to_resume(exp)


def test_a_trained_model_is_not_replaced_by_a_run_that_starts_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    make(folder.metrics_csv, 1000)
    make(folder.nemo_file(CheckpointConfig()), 1000)
    again = ExperimentConfig(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    with pytest.raises(ValueError, match=r"\.nemo: is what this run has trained, .* would overwrite it"):
        folder.checkpoint_to_resume(again)
    folder.nemo_file(CheckpointConfig()).rename(folder.checkpoints / "somebody_elses.nemo")
    assert folder.checkpoint_to_resume(again) is None


def test_a_file_put_among_the_checkpoints_does_not_come_before_the_runs_own(tmp_path: Path) -> None:
    folder, exp = RunFolder(tmp_path), ExperimentConfig(resume_if_exists=True)
    last, before, foreign = (folder.checkpoints / name for name in (LAST, BEFORE, "teacher.ckpt"))
    for number, path in enumerate((before, last, foreign)):
        make(path, 1000 + number)

    def examine(path: Path) -> None:
        if path == last:
            raise ValueError("damaged")

    assert folder.checkpoint_to_resume(exp, examine) == before


def test_metrics_of_a_run_that_starts_again_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.csv"
    MetricsWriter(path).write({"a": 1.0}, 0)
    rows = read_rows(path)
    forget_after(path, 0)
    assert not path.exists()
    assert read_rows(tmp_path / "metrics-before.csv") == rows
    assert "metrics.csv: is kept as" in caplog.text
    MetricsWriter(path).write({"a": 2.0}, 0)
    forget_after(path, 0)
    assert read_rows(tmp_path / "metrics-before.csv") == rows  # the next start does not replace it


def test_hparams_that_are_a_fifo_do_not_block(tmp_path: Path) -> None:
    with fifo_that_is_not_opened(tmp_path / "hparams.yaml"):
        assert RunFolder.open(tmp_path) == RunFolder(tmp_path)


def test_a_note_of_the_last_save_that_cannot_be_read_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / ".saved").write_text("step 7")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ValueError, match="this run has saved a checkpoint of an earlier step, and none can be resumed"):
        RunFolder(tmp_path).checkpoint_to_resume(ExperimentConfig(resume_if_exists=True))


def test_results_are_those_that_exist(tmp_path: Path) -> None:
    folder, exp = RunFolder(tmp_path), ExperimentConfig(create_tensorboard_logger=False)
    assert folder.results(exp) == {}
    make(folder.metrics_csv, 1000)
    make(folder.nemo_file(exp.checkpoint_callback_params), 1000)
    assert list(folder.results(exp)) == ["model", "metrics"]
    assert "TensorBoard" in folder.results(ExperimentConfig())


def test_the_monitor_can_use_it_without_torch_and_numpy() -> None:
    code = "import sys, nest_ssl.run_folder; assert not {'torch', 'numpy', 'omegaconf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_checkpoint_that_leads_nowhere_is_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "gone.ckpt").symlink_to(tmp_path / "nowhere")
    assert RunFolder(tmp_path).newest_checkpoint() is None
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"")
    assert RunFolder(tmp_path).newest_checkpoint() == tmp_path / "checkpoints" / "last.ckpt"


def test_of_two_names_of_one_checkpoint_the_last_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "m--val_loss=1.ckpt").write_bytes(b"")
    for name in ("last.ckpt", "a.ckpt"):
        (folder / name).hardlink_to(folder / "m--val_loss=1.ckpt")
    assert RunFolder(tmp_path).newest_checkpoint() == folder / "last.ckpt"


@pytest.mark.parametrize("deleted", ["metrics.csv", "the folder"])
def test_a_log_deleted_while_the_run_uses_it_starts_again_with_its_header(
    tmp_path: Path, deleted: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run" / "metrics.csv"
    writer = MetricsWriter(path)
    writer.write({"train_loss": 4.0}, 0)
    path.unlink() if deleted == "metrics.csv" else shutil.rmtree(path.parent)
    writer.write({"train_loss": 3.0}, 1)
    writer.write({"train_loss": 2.0}, 2)
    assert [(row["step"], row["train_loss"]) for row in read_rows(path)] == [("1", "3.0"), ("2", "2.0")]
    assert caplog.text.count("metrics.csv: was deleted while the run was using it") == 1


def test_a_log_without_a_header_does_not_prevent_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("3,1700000000.0,4.5\r\n4,1700000001.0,4.25\r\n")
    forget_after(path, 4)
    assert logged_at(path, 3) == set()
    MetricsWriter(path).write({"train_loss": 4.0}, 4)
    assert [(row["step"], row["train_loss"]) for row in read_rows(path)] == [("4", "4.0")]
    assert (tmp_path / "metrics-before.csv").read_text().startswith("3,1700000000.0,4.5")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_resumed_run_keeps_rows_whose_columns_were_reordered_line_by_line(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsWriter(path)
    for step in range(4):
        first.write({"a": -step}, step)
    lines = [",".join(line.split(",")[::-1]) for line in path.read_bytes().decode().split("\n")]  # as awk does
    path.write_bytes((mark + "\n".join(lines)).encode())
    forget_after(path, 3)
    MetricsWriter(path).write({"a": 7, "new": 1}, 3)
    assert [(row["step"], row["a"]) for row in read_rows(path)] == [("0", "0"), ("1", "-1"), ("2", "-2"), ("3", "7")]


@pytest.mark.parametrize("field", ["9" * 2**20, '"' + "9\n" * 2**19 + '"'])
def test_a_field_of_a_megabyte_is_a_damaged_row_for_a_resume(tmp_path: Path, field: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"step,time,x\n0,1,7\n1,2,{field}\n")
    forget_after(path, 1)
    MetricsWriter(path).write({"x": 8, "new": 1}, 1)
    assert [(row["step"], row["x"]) for row in read_rows(path)] == [("0", "7"), ("1", "8")]


def test_a_line_that_is_too_long_for_a_log_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,time,x\r\n0,1,7\r\n1,2," + "9" * 200_000 + "\r\n")  # longer than the csv module reads
    assert [row["x"] for row in read_rows(path)] == ["7"]
    forget_after(path, 1)
    MetricsWriter(path).write({"x": 8}, 1)
    assert [row["x"] for row in read_rows(path)] == ["7", "8"]


def test_a_log_that_cannot_be_read_does_not_prevent_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("Input/output error")

    path = tmp_path / "metrics.csv"
    path.write_text("step,time,x\r\n")
    monkeypatch.setattr(Path, "open", fail)
    forget_after(path, 1)
    assert "metrics.csv: cannot be read (Input/output error)" in caplog.text


def test_what_stands_in_the_place_of_a_runs_files_is_refused_and_left(tmp_path: Path) -> None:
    folder, other = RunFolder(tmp_path / "run"), tmp_path / "other"
    folder.path.mkdir()
    other.write_text("precious")
    folder.check_kinds()
    for path, make in ((folder.lock, lambda path: path.symlink_to(other)), (folder.hparams, Path.mkdir)):
        make(path)
        with pytest.raises(ValueError, match=f"{path}: is a (link|folder), and the run needs a file there"):
            folder.check_kinds()
        path.unlink() if path.is_symlink() else path.rmdir()
    folder.incidents.touch()
    with pytest.raises(ValueError, match="incidents: is not a folder, and the run needs one there"):
        folder.check_kinds()
    assert other.read_text() == "precious"


def test_steps_that_another_program_wrote_as_decimals_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(",step,time,train_loss\n0,0.0,1,4.5\n1,1.0,2,4.25\n2,2.0,3,4\n")
    forget_after(path, 2)
    assert [row["train_loss"] for row in read_rows(path)] == ["4.5", "4.25"]
    assert "train_loss" in logged_at(path, 1)
