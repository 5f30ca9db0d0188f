"""The encoder as an ONNX graph for any batch size and length, compared with the model before it is kept.

B batch, M mel bands, T mel frames, D width, S encoder frames.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nest_ssl.files import replacing_in
from nest_ssl.model import EncDecMaskedTokenPredModel
from nest_ssl.modules import ConformerEncoder
from nest_ssl.nemo_file import CheckpointError

OPSET = 18
INPUTS, OUTPUTS = ("audio_signal", "length"), ("outputs", "encoded_lengths")
"""NeMo's names: mels (B, M, T) and lengths (B,) in, (B, D, S) and lengths (B,) out."""
TOLERANCE = 1e-4
CHECKED_SHAPES = ((1, 8), (3, 96), (2, 250))
"""(batch, mel frames) on which the graph is compared; it is traced with another shape."""
_TRACED_SHAPE = (2, 161)


class _Encoder(nn.Module):
    """The encoder on one extra frame: a graph cannot branch for attention over a single frame."""

    def __init__(self, encoder: ConformerEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        padded_BMT = nn.functional.pad(audio_signal, (0, self.encoder.subsampling_factor))
        encoded_BDS, encoded_len = self.encoder(audio_signal=padded_BMT, length=length)
        return encoded_BDS[:, :, :-1], encoded_len


def export_onnx(model: EncDecMaskedTokenPredModel, path: Path) -> float:
    """Write the graph and return its largest difference from the model, computed with onnxruntime.

    Above 2 GB the weights are in a second file, `path` with `.data` appended. Nothing is kept if the check fails.
    """
    _need_onnx()
    encoder, num_mels = _Encoder(model.encoder).eval(), model.cfg.encoder.feat_in
    with replacing_in(path.parent, path) as folder:
        _write_graph(encoder, num_mels, folder / path.name)
        difference = _largest_difference(model.encoder, num_mels, folder / path.name)
        if math.isnan(difference):
            raise CheckpointError(f"{path}: not written: the model's outputs are not finite. Its weights are damaged.")
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{path}: the graph differs from the model by {difference:.2g}; not kept.")
    return difference


def _write_graph(encoder: _Encoder, num_mels: int, path: Path) -> None:
    batch, frames = torch.export.Dim("batch"), torch.export.Dim("frames")
    with warnings.catch_warnings(), _only_errors("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")  # torch's exporter warns about its own parts
        program = torch.onnx.export(
            encoder,
            _example(num_mels, *_TRACED_SHAPE),
            dynamo=True,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_shapes={"audio_signal": {0: batch, 2: frames}, "length": {0: batch}},
            opset_version=OPSET,
            verbose=False,
        )
        assert program is not None
        program.save(str(path))


def _largest_difference(encoder: ConformerEncoder, num_mels: int, path: Path) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = 0.0
    for shape in CHECKED_SHAPES:
        inputs = _example(num_mels, *shape)
        with torch.no_grad():
            encoded_BDS, encoded_len = encoder(*inputs)
        given = {name: tensor.numpy() for name, tensor in zip(INPUTS, inputs, strict=True)}
        graph_BDS, graph_len = session.run(list(OUTPUTS), given)
        if graph_BDS.shape != tuple(encoded_BDS.shape) or not np.array_equal(graph_len, encoded_len.numpy()):
            return math.inf
        for row, frames in enumerate(graph_len.tolist()):
            difference = np.abs(graph_BDS[row, :, :frames] - encoded_BDS[row, :, :frames].numpy())
            largest = float(np.maximum(largest, difference.max()))  # nan stays nan
    return largest


def _example(num_mels: int, batch: int, frames: int) -> tuple[Tensor, Tensor]:
    """Noise with lengths from half of `frames` to all of it."""
    mels_BMT = torch.randn(batch, num_mels, frames, generator=torch.Generator().manual_seed(frames))
    return mels_BMT, torch.linspace(frames, frames // 2 + 1, batch).long()


@contextlib.contextmanager
def _only_errors(*loggers: str) -> Iterator[None]:
    """Let only errors of these loggers through."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _need_onnx() -> None:
    # Recent versions (1.31) report their use to their makers, and leave a file for that in the temporary folder.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError("--format onnx: needs onnxscript and onnxruntime. Install nest-ssl[onnx].") from error
    onnxruntime.set_default_logger_severity(3)
