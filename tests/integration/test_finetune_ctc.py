"""examples/finetune_ctc.py on a few utterances: an export trains with transformers' Trainer, and its CER drops."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile

from nest_ssl.checkpoint.export import export_checkpoint
from tests.helpers import tiny_model

for needed in ("transformers", "accelerate", "jiwer", "librosa"):
    pytest.importorskip(needed, reason="needs nest-ssl[hf,finetune]")

RATE = 16_000
PITCHES_HZ = {"a": 150.0, "e": 300.0, "o": 600.0, " ": 0.0}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "finetune_ctc.py"
    spec = importlib.util.spec_from_file_location("finetune_ctc", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_language(folder: Path, count: int, seed: int) -> str:
    """Write a language whose letters are tones of 0.24 s, simple enough for a tiny encoder."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        text = " ".join("".join(rng.choice(list("aeo"), size=3)) for _ in range(2))
        seconds = np.arange(int(0.24 * RATE)) / RATE
        tones = [np.sin(2 * np.pi * PITCHES_HZ[letter] * seconds) * np.hanning(len(seconds)) for letter in text]
        samples = 0.3 * np.concatenate(tones) + 0.003 * rng.standard_normal(len(text) * len(seconds))
        soundfile.write(folder / f"{number}.wav", samples, RATE)
        lines.append({"audio_filepath": f"{number}.wav", "duration": len(samples) / RATE, "text": text.upper() + "!"})
    (folder / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "m.jsonl")


def test_fine_tuning_lowers_the_error_rate_and_the_model_loads_again(example: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, ParakeetForCTC

    model = tiny_model(
        {"encoder.subsampling_factor": 4, "quantizer.combine_time_steps": 4, "loss.combine_time_steps": 4}
    )
    model.save_to(tmp_path / "nest.nemo")
    export_checkpoint(tmp_path / "nest.nemo", tmp_path / "exported", "huggingface")
    train, test = write_language(tmp_path / "train", 32, 0), write_language(tmp_path / "test", 8, 1)
    common = [str(tmp_path / "exported"), "--train", train, "--test", test, "--lr", "0.005"]
    common += ["--vocab-size", "5", "--seed", "1"]
    barely = example.main([*common, "--output", str(tmp_path / "barely"), "--max-steps", "1"])
    tuned = example.main([*common, "--output", str(tmp_path / "tuned"), "--max-steps", "120"])
    assert tuned["cer"] < 0.7 * barely["cer"]
    again = ParakeetForCTC.from_pretrained(tmp_path / "tuned")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    assert again.config.vocab_size == len(tokenizer) == 5  # a, e, o, the space and the blank
    assert again.config.pad_token_id == tokenizer.pad_token_id


def test_text_becomes_subwords_and_frames_become_text(example: Any) -> None:
    tokenizer = example.make_tokenizer(["hello you", "hello again"], 40)
    assert example.normalize("  Hello, YOU 2!") == "hello you"
    labels = tokenizer("hello you").input_ids
    assert len(labels) < len("hello you")
    frames = [number for label in labels for number in (label, label, tokenizer.pad_token_id)]
    assert tokenizer.batch_decode([frames], skip_special_tokens=True) == ["hello you"]


def test_a_manifest_without_texts_is_named(example: Any, tmp_path: Path) -> None:
    path = write_language(tmp_path / "train", 2, 0)
    Path(path).write_text('{"audio_filepath": "0.wav", "duration": 1.0}\n')
    with pytest.raises(SystemExit, match="m.jsonl:1: no 'text' to learn from"):
        example.Transcribed(path, RATE)
