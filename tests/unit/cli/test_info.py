from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from nest_ssl import CheckpointError, load
from nest_ssl.checkpoint.summary import open_source, parameter_differences, summarize
from nest_ssl.cli.console import make_table
from tests.helpers import model_section, tiny_model

GOLDEN = Path(__file__).parents[2] / "parity" / "golden"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = "from nest_ssl.cli.main import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    env = {name: value for name, value in os.environ.items() if name != "NEST_SSL_NEMO_PYTHON"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize(
    ("size", "total", "encoder"),
    [
        ("small", 14_191_616, 12_600_240),
        ("medium", 28_375_376, 26_128_640),
        ("large", 113_106_000, 108_762_112),
        ("large_18", 119_418_448, 115_074_560),
        ("xlarge", 615_844_944, 607_306_752),
        ("xxlarge", 1_069_081_680, 1_060_543_488),
    ],
)
def test_sizes_are_nemos_to_the_digit(size: str, total: int, encoder: int) -> None:
    summary = summarize(open_source("nest_fast-conformer", [f"size={size}"]))
    assert (summary.parameters, summary.encoder_parameters) == (total, encoder)
    assert sum(row.parameters for row in summary.rows) == total
    assert summary.encoder_frames_per_s == 12.5


def test_info_prints_totals_shapes_and_memory_even_into_a_pipe() -> None:
    done = run("info", "nest_fast-conformer", "size=small")
    assert done.returncode == 0, done.stderr
    for words in ("14,191,616", "12,600,240", "encoder.layers.0…15", "1 × 202 × 176", "57.3 MB", "12.5 encoder frames"):
        assert words in done.stdout


def test_info_of_two_files_lists_every_difference() -> None:
    done = run("info", GOLDEN / "pre_conv.nemo", GOLDEN / "four_books.nemo")
    assert done.returncode == 0, done.stderr
    assert "decoder.num_decoders" in done.stdout
    assert "(64, 32, 1)" in done.stdout
    assert "(256, 32, 1)" in done.stdout


def test_the_same_file_has_no_difference_and_a_changed_weight_has_one(tmp_path: Path) -> None:
    model = load(GOLDEN / "pre_conv.nemo")
    model.get_parameter("decoder.decoder_layers.0.bias").data[3] += 0.5
    model.save_to(tmp_path / "changed.nemo")
    a = open_source(str(GOLDEN / "pre_conv.nemo"))
    assert parameter_differences(a, open_source(str(GOLDEN / "pre_conv.nemo"))) == []
    changed = parameter_differences(a, open_source(str(tmp_path / "changed.nemo")))
    assert changed == [("decoder.decoder_layers.0.bias", "values", "differ by up to 0.5")]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("encoder.layers.0.norm_out.weight", lambda x: x * float("nan")),
        ("encoder.layers.0.norm_out.weight", lambda x: x.bool()),
        ("encoder.layers.0.norm_out.weight", lambda x: x[:-1]),
        ("preprocessor.featurizer.window", lambda x: x * 0),
    ],
)
def test_info_refuses_weights_that_cannot_be_used(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    weights = dict(tiny_model().state_dict())
    weights[name] = change(weights[name])
    torch.save({"state_dict": weights, "hyper_parameters": model_section()}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=rf"(?s)x\.ckpt: .*{name}"):
        open_source(str(tmp_path / "x.ckpt"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "nothing.nemo"], "nothing.nemo: no such file"),
        (["info", "nothing"], "Built-in configurations: nest_demo, nest_fast-conformer"),
        (["info", "nest_fast-conformer", "model.encoder.n_layer=2"], "Did you mean 'model.encoder.n_layers'?"),
        (["info", "a", "b", "c"], "expected one or two models"),
        (["info", str(GOLDEN)], "golden: is a folder"),
        (["info", ""], "nest-ssl: the argument after 'info' is empty"),
        (["info", "https://x/y.nemo"], "nest-ssl: argument: https://x/y.nemo: nest-ssl reads local files only"),
        (["info", str(GOLDEN / "batch.npz")], "no .nemo, .ckpt or .yaml file"),
        (["info", str(GOLDEN / "pre_conv.nemo"), "size=small"], "a checkpoint has its own"),
        (["verify", "nothing.nemo"], "nothing.nemo: no such file"),
        (["verify", str(GOLDEN / "pre_conv.nemo"), "--recorded", "nothing.npz"], "nothing.npz: no such file"),
        (["verify", str(GOLDEN / "pre_conv.nemo"), "--recorded", str(GOLDEN / "pre_conv.nemo")], "not an .npz file"),
    ],
)
def test_what_a_user_can_fix_is_a_line_and_not_a_traceback(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"model: [1, 2", "not a readable yaml"), (b"[1, 2]", "expected a mapping"), (b"\xff\xfe", "not a readable yaml")],
)
def test_a_yaml_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"broken\.yaml: {words}"):
        open_source(str(path))


def test_an_export_does_not_replace_the_file_that_it_reads(tmp_path: Path) -> None:
    path = Path(shutil.copy(GOLDEN / "pre_conv.nemo", tmp_path))
    done = run("export", path, path, "--format", "nemo")
    assert done.returncode == 1
    assert f"OUT {path}: would overwrite the input" in done.stderr
    assert path.read_bytes() == (GOLDEN / "pre_conv.nemo").read_bytes()


def test_names_are_printed_as_they_are_even_with_brackets_and_equal_signs(tmp_path: Path) -> None:
    name = "[red]lr=1:x:.nemo"
    shutil.copy(GOLDEN / "pre_conv.nemo", tmp_path / name)
    done = run("info", tmp_path / name)
    assert done.returncode == 0, done.stderr
    assert f"{name}: EncDecDenoiseMaskedTokenPredModel" in done.stdout


def test_numbers_are_never_broken_in_two_on_a_narrow_terminal() -> None:
    table = make_table(["module", "class"], ["parameters"])
    table.add_row("encoder.layers.0…16", "AudioToMelSpectrogramPreprocessor", "107,311,616")
    console = Console(width=40, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    assert "107,311,616" in console.file.getvalue()
