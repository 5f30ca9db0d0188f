"""Schedules that NeMo was asked about. Imported by the recorder under NeMo too."""

from __future__ import annotations

from typing import Any

NUM_STEPS = 300
"""Steps recorded: beyond `max_steps` in every case that has one."""
BASE_LRS = (0.02, 0.005)
"""Peak rates of two parameter groups."""

NOAM = {"name": "NoamAnnealing", "d_model": 176}
COSINE = {"name": "CosineAnnealing", "max_steps": 250}
WARMUP = {"name": "WarmupAnnealing", "max_steps": 250}
ROOT = {"name": "InverseSquareRootAnnealing", "max_steps": 250}
POLYNOMIAL = {"name": "PolynomialDecayAnnealing", "max_steps": 250}

CASES: dict[str, dict[str, Any]] = {
    "noam": {**NOAM, "warmup_steps": 40, "min_lr": 1e-6},
    "noam_high_floor": {**NOAM, "warmup_steps": 40, "min_lr": 2e-4},
    "noam_no_warmup": NOAM,
    "noam_ratio": {**NOAM, "max_steps": 250, "warmup_ratio": 0.13},
    "cosine": COSINE,
    "cosine_warmup": {**COSINE, "warmup_steps": 30, "min_lr": 1e-4},
    "cosine_ratio": {**COSINE, "warmup_ratio": 0.31},
    "cosine_constant": {**COSINE, "warmup_steps": 30, "constant_steps": 60, "min_lr": 1e-4},
    "cosine_constant_no_warmup": {**COSINE, "constant_steps": 60, "min_lr": 1e-4},
    "cosine_ratios": {**COSINE, "warmup_ratio": 0.1, "constant_ratio": 0.21, "min_lr": 1e-5},
    "cosine_all_warmup": {**COSINE, "warmup_steps": 250, "min_lr": 1e-5},
    "warmup": {**WARMUP, "warmup_steps": 30, "min_lr": 1e-4},
    "warmup_ratio": {**WARMUP, "warmup_ratio": 0.07},
    "warmup_none": WARMUP,
    "warmup_beyond_the_end": {**WARMUP, "warmup_steps": 280, "min_lr": 1e-5},
    "root": {**ROOT, "warmup_steps": 30, "min_lr": 1e-4},
    "root_ratio": {**ROOT, "warmup_ratio": 0.2},
    "root_no_warmup": ROOT,
    "polynomial": {**POLYNOMIAL, "warmup_steps": 30, "min_lr": 1e-4},
    "polynomial_square": {**POLYNOMIAL, "warmup_ratio": 0.1, "power": 2.0},
    "polynomial_root_cycle": {**POLYNOMIAL, "power": 0.5, "cycle": True, "min_lr": 1e-4},
    "polynomial_warmup_cycle": {**POLYNOMIAL, "warmup_steps": 20, "power": 3.0, "cycle": True},
}
