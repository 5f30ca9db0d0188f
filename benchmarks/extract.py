"""Seconds of audio per second of feature extraction: nest-ssl and NeMo, in one run, with the same model.

    python benchmarks/extract.py --nemo-python /path/to/nemo/bin/python --output benchmarks/results/extract.json

Utterances of 2 to 16 s as WAV files in random order; all layers; one .npy file per utterance. NeMo's side does what its
scripts/ssl/extract_features.py does (a loader, its multi-layer feature extractor, batches of 8 in manifest order, files
at the end), but in eval mode, which that script forgets. Both are measured after a warm-up and without loading the
model, and their features are compared. Without NeMo's interpreter (also NEST_SSL_NEMO_PYTHON) its row holds a note.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch

RATE = 16_000
PEER = "NeMo 2.7.3"
NEMO_SCRIPT = """
import json, os, sys, time
import numpy as np, torch
from nemo.collections.asr.data.audio_to_text_dataset import get_char_dataset
from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
from nemo.collections.asr.modules.ssl_modules.multi_layer_feat import ConformerMultiLayerFeatureExtractor
from nemo.core.classes.common import typecheck

typecheck.set_typecheck_enabled(enabled=False)
checkpoint, manifest, out, device, workers, batch_size, amp = sys.argv[1:8]
model = EncDecDenoiseMaskedTokenPredModel.restore_from(checkpoint, map_location=device).to(device).eval()
extractor = ConformerMultiLayerFeatureExtractor(model.encoder)
lines = [json.loads(line) for line in open(manifest)]
labelled = manifest + ".nemo.jsonl"
with open(labelled, "w") as file:
    for line in lines:
        file.write(json.dumps({"audio_filepath": line["audio_filepath"], "duration": None, "text": "-"}) + "\\n")
dataset = get_char_dataset({"manifest_filepath": labelled, "sample_rate": 16000, "return_sample_id": True})


def run(limit):
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=int(batch_size), collate_fn=dataset.collate_fn, num_workers=int(workers),
        pin_memory=device != "cpu")
    results = []
    with torch.autocast(device, dtype=torch.bfloat16, enabled=amp == "bf16"), torch.inference_mode():
        for number, (audio, length, _, _, ids) in enumerate(loader):
            mels, mel_len = model.preprocessor(input_signal=audio.to(device), length=length.to(device))
            features, lens = extractor(audio_signal=mels, length=mel_len)
            for row in range(len(ids)):
                stacked = torch.stack([layer[row][:, : lens[0][row]] for layer in features])
                results.append((int(ids[row]), stacked.float().cpu().numpy()))
            if number + 1 == limit:
                break
    for index, features in results:
        np.save(f"{out}/{index}.npy", features)


run(2)
start, before = time.perf_counter(), sum(os.times()[:4])
run(None)
print("SECONDS", time.perf_counter() - start, sum(os.times()[:4]) - before)
"""


class Times(NamedTuple):
    """The time of one run, including its workers."""

    wall_s: float
    cpu_s: float
    """Time on all cores: the one to compare on a CPU that is shared with others."""


def write_audio(folder: Path, count: int, seed: int) -> tuple[Path, float]:
    """Write noise with a syllable-like envelope (speed does not depend on content); return manifest and seconds."""
    rng = np.random.default_rng(seed)
    lines, total_s = [], 0.0
    for number in range(count):
        duration_s = float(rng.uniform(2, 16))
        t = np.arange(int(duration_s * RATE)) / RATE
        samples = 0.1 * rng.standard_normal(len(t)) * np.clip(np.sin(2 * np.pi * 2.5 * t), 0.05, None)
        path = folder / f"{number}.wav"
        soundfile.write(path, samples, RATE)
        lines.append(json.dumps({"audio_filepath": str(path), "duration": len(t) / RATE}))
        total_s += duration_s
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "manifest.jsonl", total_s


def make_checkpoint(size: str, path: Path) -> None:
    from nest_ssl import EncDecDenoiseMaskedTokenPredModel
    from nest_ssl.config import compose

    torch.manual_seed(0)
    EncDecDenoiseMaskedTokenPredModel(compose("nest_fast-conformer", [f"size={size}"]).model).save_to(path)


def time_ours(checkpoint: Path, manifest: Path, out: Path, device: str, precision: str, workers: int) -> Times:
    from nest_ssl.extract import FeatureExtractor, extract_features
    from nest_ssl.extract.extract import ExtractOptions

    extractor = FeatureExtractor(checkpoint, "all", device=device, precision=precision)
    rng = np.random.default_rng(0)
    for _ in range(2):
        extractor.batch([rng.standard_normal(8 * RATE).astype(np.float32)] * 4)
    start, before = time.perf_counter(), sum(os.times()[:4])
    result = extract_features(extractor, manifest, out, ExtractOptions(num_workers=max(1, workers)))
    assert not result.bad
    return Times(time.perf_counter() - start, sum(os.times()[:4]) - before)


def time_nemo(
    python: str | None,
    checkpoint: Path,
    manifest: Path,
    out: Path,
    device: str,
    precision: str,
    workers: int,
    batch: int,
) -> Times | None:
    """Time NeMo's extraction; None without NeMo."""
    if not python:
        return None
    out.mkdir()
    command = [
        python,
        "-c",
        NEMO_SCRIPT,
        str(checkpoint),
        str(manifest),
        str(out),
        device,
        str(workers),
        str(batch),
        precision,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        raise SystemExit("NeMo's side failed; its output is above")
    return Times(*map(float, done.stdout.rsplit("SECONDS", 1)[1].split()))


def largest_difference(ours: Path, theirs: Path) -> float:
    """Return the largest difference between the features of all utterances, in fp32."""
    from nest_ssl.extract.files import read_features

    largest = 0.0
    for number, line in enumerate((ours / "manifest.jsonl").read_text().splitlines()):
        difference = np.abs(read_features(ours, json.loads(line)) - np.load(theirs / f"{number}.npy"))
        largest = max(largest, float(difference.max()))
    return largest


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest, audio_s = write_audio(folder, args.utterances, seed=0)
        checkpoint = folder / "nest.nemo"
        make_checkpoint(args.size, checkpoint)
        common = (args.device, args.precision, args.workers)
        for repeat in range(args.repeats):  # they take turns, so that other load affects both
            ours = time_ours(checkpoint, manifest, folder / f"ours{repeat}", *common)
            rows.append({"system": "nest-ssl", **ours._asdict(), "times_real_time": audio_s / ours.wall_s})
            nemo = time_nemo(args.nemo_python, checkpoint, manifest, folder / f"nemo{repeat}", *common, args.batch_size)
            if nemo is None:
                rows.append({"system": PEER, "note": "not importable here"})
                continue
            row = {"system": PEER, **nemo._asdict(), "times_real_time": audio_s / nemo.wall_s}
            row |= {"wall_ratio": nemo.wall_s / ours.wall_s, "cpu_ratio": nemo.cpu_s / ours.cpu_s}
            row["largest_difference"] = largest_difference(folder / f"ours{repeat}", folder / f"nemo{repeat}")
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    parser.add_argument("--utterances", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="NeMo's batch size; 8 is its script's default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--nemo-python", default=os.environ.get("NEST_SSL_NEMO_PYTHON"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = measure(args)
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()))
    if args.output:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        device = (
            torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
        )
        about = {"commit": commit, "device": device, "torch": torch.__version__, "size": args.size, "rows": rows}
        about |= {"utterances": args.utterances, "workers": args.workers, "precision": args.precision}
        args.output.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
