"""Pre-training as a user runs it: one command, killed and resumed, on one and on two ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nest_ssl import load
from tests.integration.runs import arguments, losses, run, run_and_kill, run_here

KILLED_IN_SECOND_SAVE = """
import os, signal, sys
import torch
saves = []
save = torch.save
def save_and_die(value, file, *rest):
    saves.append(file)
    save(value, file, *rest)
    if len(saves) == 2:
        file.truncate(file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = save_and_die
from nest_ssl.cli.main import main
main(["pretrain", *sys.argv[1:]])
"""
KILLED_IN_VALIDATION = """
import os, signal, sys
from nest_ssl.training.validation import Validation
Validation._metrics = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from nest_ssl.cli.main import main
main(["pretrain", *sys.argv[1:]])
"""
TWO_RANKS = ("trainer.devices=2", "trainer.strategy=ddp")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    exp_dir = tmp_path_factory.mktemp("whole")
    done = run(arguments(corpus, exp_dir, "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    return exp_dir / "run"


def test_the_run_folder_holds_what_nemos_exp_manager_writes(whole: Path) -> None:
    names = {path.name for path in (whole / "checkpoints").iterdir()}
    assert {"last.ckpt", "run.nemo"} <= names
    assert any("val_loss=" in name for name in names)
    assert (whole / "hparams.yaml").is_file()
    assert (whole / "git-commit.txt").is_file()
    assert sorted(losses(whole / "metrics.csv")) == list(range(10))
    header = (whole / "metrics.csv").read_text().splitlines()[0].split(",")
    for name in ("step", "time", "accuracy", "mask_rate", "codebook_coverage", "codebook_entropy", "learning_rate"):
        assert name in header
    for name in ("audio_s_per_s", "padding_share", "data_wait_share", "val_loss", "train_loss_epoch"):
        assert name in header


def test_checkpoint_and_nemo_file_hold_the_same_model(whole: Path) -> None:
    nemo, ckpt = load(whole / "checkpoints" / "run.nemo"), load(whole / "checkpoints" / "last.ckpt")
    assert nemo.cfg.encoder == ckpt.cfg.encoder
    assert nemo.state_dict().keys() == ckpt.state_dict().keys()
    assert torch.equal(nemo.quantizer.codebooks, ckpt.quantizer.codebooks)


def test_a_killed_run_resumes_to_the_same_losses(corpus: Path, whole: Path, tmp_path: Path) -> None:
    args = arguments(corpus, tmp_path, "run", "model.train_ds.num_workers=2")
    run_and_kill(args, tmp_path / "run" / "metrics.csv", at_step=7)
    done = run(args)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed at step 6" in done.stderr
    for column in ("train_loss", "val_loss", "learning_rate", "train_loss_epoch"):
        assert losses(tmp_path / "run" / "metrics.csv", column) == losses(whole / "metrics.csv", column)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_run_killed_on_a_gpu_resumes_to_the_same_losses(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process compiles for itself: kernels must not depend on what one of them happened to measure."""
    size = ("size=medium", "model.encoder.d_model=256", "model.encoder.n_layers=4", "model.encoder.n_heads=4")
    more = (
        *size,
        "trainer.accelerator=gpu",
        "trainer.precision=bf16",
        "trainer.max_steps=120",
        "exp_manager.ema.enable=true",
    )

    def fresh(name: str) -> None:
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            monkeypatch.setenv(variable, str(tmp_path / name / variable))

    fresh("first")
    whole = run(arguments(corpus, tmp_path, "whole", *more))
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert "CUDA graphs" in whole.stderr
    args = arguments(corpus, tmp_path, "run", *more)
    fresh("second")
    run_and_kill(args, tmp_path / "run" / "metrics.csv", at_step=50)
    fresh("third")
    resumed = run(args)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "resumed at step" in resumed.stderr
    for column in ("train_loss", "val_loss", "accuracy"):
        wanted = losses(tmp_path / "whole" / "metrics.csv", column)
        assert losses(tmp_path / "run" / "metrics.csv", column) == wanted != {}


def test_a_run_killed_while_saving_resumes_from_the_checkpoint_before(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    args = arguments(corpus, tmp_path, "run")
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_SECOND_SAVE, *args], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    checkpoints = tmp_path / "run" / "checkpoints"
    half_written = list(checkpoints.glob(".*.ckpt.*.tmp"))
    assert half_written
    assert [path.name for path in checkpoints.glob("*.ckpt")] == ["last.ckpt"]
    done = run(args)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed at step 3" in done.stderr
    for column in ("train_loss", "train_loss_epoch", "learning_rate_epoch"):
        assert losses(tmp_path / "run" / "metrics.csv", column) == losses(whole / "metrics.csv", column)
    assert not list(checkpoints.glob(".*.tmp"))


def test_a_run_killed_in_validation_resumes_to_the_same_losses(corpus: Path, whole: Path, tmp_path: Path) -> None:
    args = arguments(corpus, tmp_path, "run")
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_VALIDATION, *args], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    done = run(args)
    assert done.returncode == 0, done.stderr[-3000:]
    for column in ("train_loss", "val_loss", "train_loss_epoch"):
        assert losses(tmp_path / "run" / "metrics.csv", column) == losses(whole / "metrics.csv", column)


def test_a_full_disk_is_reported_and_earlier_checkpoints_stay(corpus: Path, tmp_path: Path) -> None:
    args = arguments(corpus, tmp_path, "run")
    done = run([*args, "trainer.max_steps=3", "~model.validation_ds"])
    assert done.returncode == 0, done.stderr[-3000:]
    kept = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").glob("*.ckpt")}
    size = max(len(data) for data in kept.values())
    # No file may grow beyond half a checkpoint: the write fails as on a full disk, without a mount.
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2}))"
    program = f"{limit}\nimport sys\nfrom nest_ssl.cli.main import main\nmain(['pretrain', *sys.argv[1:]])"
    full = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True)
    assert full.returncode == 1
    assert "the checkpoint could not be written" in full.stderr
    assert "MB are free" in full.stderr
    assert "Traceback" not in full.stderr
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert not list((tmp_path / "run" / "checkpoints").glob(".*.tmp"))


def test_two_ranks_resume_to_the_same_losses_and_one_rank_can_take_over(corpus: Path, tmp_path: Path) -> None:
    undisturbed = arguments(corpus, tmp_path, "whole", *TWO_RANKS)
    done = run(undisturbed)
    assert done.returncode == 0, done.stderr[-3000:]
    all_are_best = "exp_manager.checkpoint_callback_params.save_top_k=-1"
    args = arguments(corpus, tmp_path, "cut", *TWO_RANKS, all_are_best)
    run_and_kill(args, tmp_path / "cut" / "metrics.csv", at_step=4)
    done = run([*args, "trainer.max_steps=9"])  # to the end of an epoch, and a validation
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoints = tmp_path / "cut" / "checkpoints"
    assert next(checkpoints.glob("*step=9.ckpt")).samefile(checkpoints / "last.ckpt")
    expected = losses(tmp_path / "whole" / "metrics.csv")
    resumed = losses(tmp_path / "cut" / "metrics.csv")
    assert resumed == {step: loss for step, loss in expected.items() if step < 9}
    done = run(arguments(corpus, tmp_path, "cut"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed on 1 rank (was 2)" in done.stderr


def test_train_py_trains_like_the_command(corpus: Path, tmp_path: Path) -> None:
    train_py = Path(__file__).parents[2] / "train.py"
    args = arguments(corpus, tmp_path, "run", "trainer.max_steps=1", "~model.validation_ds")
    done = subprocess.run([sys.executable, str(train_py), *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run" / "metrics.csv").keys() == {0}


def test_a_run_that_diverges_ends_with_a_message(corpus: Path, tmp_path: Path) -> None:
    explodes = ("model.optim.lr=1000", "model.optim.weight_decay=1e6", "trainer.max_steps=40")  # weights × -1e9 a step
    done = run([*arguments(corpus, tmp_path, "run"), *explodes])
    assert done.returncode == 1
    assert "the loss is not finite; every rank skips this step. Files of the batch: " in done.stderr
    assert "no finite gradient for 20 steps in a row; training has diverged. Lower model.optim.lr" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def bad_manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Manifests: empty.jsonl, and broken.jsonl, whose files hold no audio."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.jsonl").write_text("")
    for number in range(8):
        (folder / f"{number}.wav").write_bytes(b"RIFF, it says, and nothing else")
    lines = [f'{{"audio_filepath": "{number}.wav", "duration": 1.2}}\n' for number in range(8)]
    (folder / "broken.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["model.train_ds.manifest_filepath=/nowhere.jsonl"], "/nowhere.jsonl: no such manifest"),
        (["model.train_ds.manifest_filepath={bad}/empty.jsonl"], "empty.jsonl: is empty"),
        (["model.train_ds.manifest_filepath={bad}/broken.jsonl"], "can be read"),
        (["trainer.devices=3", "trainer.accelerator=gpu"], "no CUDA GPU was found"),
        (["~model.train_ds.manifest_filepath"], "'nest-ssl demo' makes some and trains on it"),
        (["model.train_ds.min_duration=50"], "no utterance is left between min_duration and max_duration"),
        (
            ["exp_manager.create_early_stopping_callback=true", "trainer.limit_val_batches=0"],
            "early_stopping_callback_params.monitor: there is nothing to validate on",
        ),
        (["model.train_ds.batch_size=400"], "model.train_ds.batch_size: 24 utterances do not fill one batch"),
        (["model.train_ds.manifest_filepath=m_{{0..3}}.json"], """manifest_filepath="m_{0..3}.json"'"""),
        (["model.optim.name=adamwww"], "adamwww"),
        (["exp_manager.exp_dir=/proc/nowhere"], "/proc/nowhere"),
        (["init_from_nemo_model=/nowhere.nemo"], "/nowhere.nemo: no such file"),
        (["trainer.accelerator=gpu"], "no CUDA GPU was found"),
        (["model.encoder.n_layer=1"], "Did you mean 'model.encoder.n_layers'?"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    corpus: Path, bad_manifests: Path, tmp_path: Path, more: list[str], words: str
) -> None:
    if "trainer.accelerator=gpu" in more and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run([*arguments(corpus, tmp_path, "run"), *(option.format(bad=bad_manifests) for option in more)])
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_folder_that_another_run_uses_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); "
    hold += "print('process 7 on gpu-node', file=f, flush=True); print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", hold, str(tmp_path / "run" / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"run: another run is using it \(process 7 on gpu-node\)"):
            run_here(arguments(corpus, tmp_path, "run"))
        other.kill()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "checkpoints"}
    run_here(arguments(corpus, tmp_path, "run", "trainer.max_steps=1"))
    run_here(arguments(corpus, tmp_path, "run", "trainer.max_steps=2"))
