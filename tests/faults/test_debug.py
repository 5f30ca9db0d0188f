"""`debug.trace` and `debug.barrier`, on real ranks."""

from __future__ import annotations

import re

import pytest

from tests.faults.harness import FLOOR_S, Lab, check_named


@pytest.mark.faults
def test_trace_shows_every_stage_of_every_rank(lab: Lab) -> None:
    run = lab.start(more=("debug.trace=true", "trainer.max_steps=1", "~model.validation_ds")).wait()
    assert run.returncode == 0, run.stderr[-4000:]
    for rank in range(2):
        told = "\n".join(re.findall(rf"trace \S+ rank {rank} step \d+: (.*)", run.stderr))
        assert "encoder.sync_max_audio_length: False (config: False)" in told
        assert "process group: initialised, backend gloo" in told
        for stage in ("preprocessor", "quantizer", "masking", "encoder", "decoder", "loss"):
            assert f"before {stage}:" in told
            assert re.search(rf"after {stage}, [\d.]+ ms:", told)
        for part in ("pre_encode", "positions", "layer 0", "layer 1"):
            assert f"before encoder {part}:" in told
        assert re.search(
            r"before encoder: audio_signal \(4, 80, \d+\) float32 cpu, 0 NaN, 0 Inf; length \(4,\) int64", told
        )
        assert re.search(r"after backward, [\d.]+ ms", told)


@pytest.mark.faults
def test_the_barrier_names_the_rank_that_did_not_arrive(lab: Lab) -> None:
    run = lab.start("preprocessor:sleep 1 4", more=("debug.barrier=true",)).wait()
    incident = check_named(run, ranks=[1], stage="preprocessor", within_s=FLOOR_S + 2)
    assert "monitoredBarrier" in incident["cause"] or incident["kind"] == "missing"
