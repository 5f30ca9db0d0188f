"""A rank stalls: within T + 2 s the report names rank, stage and cause, and the job ends and can be resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.harness import FLOOR_S, Lab, check_named, check_resumes
from tests.helpers import blocking

LIMIT_S = FLOOR_S + 2


def test_row_3_a_rank_that_sleeps_in_the_encoder_is_named(lab: Lab, whole: Path) -> None:
    run = lab.start("encoder:sleep 1 4").wait()
    incident = check_named(run, ranks=[1], stage="encoder", within_s=LIMIT_S)
    assert incident["step"] == 4
    assert incident["waiting"] == {"0": "exchange"}
    assert "all_reduce" in incident["collective"]
    assert incident["stack"][0].startswith("sleep")
    assert {path.name for path in Path(incident["evidence"], "stacks").iterdir()} >= {"rank0.txt", "rank1.txt"}
    assert Path(incident["evidence"], "flight_recorder_rank0.json").is_file()
    check_resumes(lab, run, whole)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "rank", "stage", "part", "words"),
    [
        pytest.param("encoder:sleep", 0, "encoder", "", "does not return", id="row_3_rank_0"),
        pytest.param("encoder:spin", 1, "encoder", "", "(process running)", id="row_4_busy_loop"),
        pytest.param("encoder:hold_the_gil", 1, "encoder", "", "GIL", id="row_5_gil_held"),
        pytest.param("optimizer:sleep", 1, "optimizer", "", "does not return", id="row_15_optimizer"),
        pytest.param("validation:sleep", 1, "validation", "encoder", "does not return", id="row_16_validation"),
        pytest.param("preprocessor:sleep", 0, "preprocessor", "", "does not return", id="row_25_preprocessor"),
        pytest.param("layer_1:sleep", 1, "encoder", "layer 1", "does not return", id="row_25_layer_1"),
        pytest.param("backward:sleep", 1, "backward", "", "does not return", id="row_26_backward"),
    ],
)
def test_stalled_code_is_named_by_rank_and_stage(
    lab: Lab, whole: Path, fault: str, rank: int, stage: str, part: str, words: str
) -> None:
    run = lab.start(f"{fault} {rank} 4").wait()
    incident = check_named(run, ranks=[rank], stage=stage, within_s=LIMIT_S)
    assert incident["part"] == part
    assert words in incident["cause"]
    assert list(incident["waiting"]) == [str(1 - rank)]
    check_resumes(lab, run, whole)


@pytest.mark.faults
def test_row_2_a_frozen_rank_is_named(lab: Lab, whole: Path) -> None:
    run = lab.start("encoder:freeze 1 4").wait()
    incident = check_named(run, ranks=[1], stage="encoder", within_s=LIMIT_S)
    assert "is stopped" in incident["cause"]
    assert incident["stack"][0].startswith("freeze")
    check_resumes(lab, run, whole)


@pytest.mark.faults
def test_the_stalled_one_of_four_ranks_is_named(lab: Lab) -> None:
    run = lab.start("encoder:sleep 2 2", ranks=4, more=("model.train_ds.batch_size=2",)).wait()
    incident = check_named(run, ranks=[2], stage="encoder", within_s=LIMIT_S)
    assert sorted(incident["waiting"]) == ["0", "1", "3"]


@pytest.mark.faults
def test_a_single_rank_is_monitored_on_request(lab: Lab) -> None:
    run = lab.start("encoder:sleep 0 4", ranks=1, more=("watchdog.enabled=true",)).wait()
    incident = check_named(run, ranks=[0], stage="encoder", within_s=LIMIT_S)
    assert incident["waiting"] == {}


def _manifest_with_a_copy(lab: Lab) -> tuple[Path, Path]:
    """Replace file 5 of the corpus with a copy of its own; return the manifest and the copy."""
    lines = [json.loads(line) for line in (lab.corpus / "train.jsonl").read_text().splitlines()]
    for line in lines:
        line["audio_filepath"] = str(lab.corpus / line["audio_filepath"])
    copy = Path(shutil.copy(lines[5]["audio_filepath"], lab.folder / "blocks.wav"))
    lines[5]["audio_filepath"] = str(copy)
    manifest = lab.folder / "train.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return manifest, copy


@pytest.mark.parametrize(
    ("workers", "threads"),
    [(2, 1), pytest.param(0, 1, marks=pytest.mark.faults), pytest.param(0, 3, marks=pytest.mark.faults)],
)
def test_row_7_a_file_that_blocks_is_named(lab: Lab, workers: int, threads: int) -> None:
    manifest, blocks = _manifest_with_a_copy(lab)
    more = (f"model.train_ds.manifest_filepath={manifest}", f"model.train_ds.num_workers={workers}")
    with blocking(blocks):
        run = lab.start(more=more, env={"OMP_NUM_THREADS": str(threads)}).wait()
    incident = run.incident
    run.struck_at = Path(incident["evidence"]).stat().st_ctime - incident["stalled_s"]
    rank = incident["ranks"][0]
    incident = check_named(run, ranks=[rank], stage="data", within_s=LIMIT_S)
    assert incident["file"] == str(blocks)
    assert "network disk" in incident["cause"]
    if workers:
        assert "DataLoader worker" in incident["cause"]


@pytest.mark.faults
def test_row_9_a_frozen_worker_is_named_with_its_file(lab: Lab, whole: Path) -> None:
    run = lab.start("loader:freeze 1 9", more=("model.train_ds.num_workers=1",)).wait()
    incident = check_named(run, ranks=[1], stage="data", within_s=LIMIT_S + 1)  # prefetched batches are used up first
    assert incident["file"].endswith(".wav")
    assert "is stopped" in incident["cause"]
    check_resumes(lab, run, whole)
