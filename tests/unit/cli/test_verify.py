"""`nest-ssl verify` as a user calls it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nest_ssl.cli.main import main

GOLDEN = Path(__file__).parents[2] / "parity" / "golden"


@pytest.mark.parametrize("name", ["pre_conv.nemo", "pre_conv.npz", "batch.npz", "train.jsonl"])
def test_a_report_does_not_overwrite_the_model_or_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for copied in ("pre_conv.nemo", "pre_conv.npz", "batch.npz"):
        shutil.copy(GOLDEN / copied, tmp_path / copied)
    (tmp_path / "train.jsonl").write_text("{}")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "pre_conv.nemo"), "--report", str(tmp_path / name)])
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert any(
        f"--report {tmp_path / name}: {words}" in printed for words in ("would overwrite the input", "is no Mark")
    )
    assert (tmp_path / name).read_bytes() == before
