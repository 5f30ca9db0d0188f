"""Checkpoints by their name on the Hugging Face hub, such as nvidia/ssl_en_nest_large_v1.0."""

from __future__ import annotations

import re
from pathlib import Path

from nest_ssl.nemo_file import CheckpointError, one_line

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILE_SUFFIXES = (".nemo", ".ckpt", ".safetensors")


def checkpoint_path(name: str | Path) -> Path:
    """The file that `name` means: a path, or a model of the hub where there is no such path."""
    path = Path(name).expanduser()
    if path.suffix in FILE_SUFFIXES or not HUB_NAME.fullmatch(str(name)) or path.exists():
        return path
    return hub_file(str(name))


def hub_file(name: str) -> Path:
    """The `.nemo` file of a model of the hub, from its local cache or the network."""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name}: not a file, and huggingface_hub is not installed to look it up. "
            f"Install nest-ssl[hf], or download the .nemo file and give its path."
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.nemo"]))
    except Exception as error:  # whatever a network, a proxy or the hub can say
        cached = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
        raise CheckpointError(
            f"{name}: no such file, and it could not be had from the hub ({one_line(error, 200)}). "
            f"Without a network: download its .nemo file elsewhere (https://huggingface.co/{name}/tree/main) and "
            f"give the path, or copy the folder {cached} from a machine that has it."
        ) from error
    found = sorted(folder.glob("*.nemo"))
    if not found:
        raise CheckpointError(f"{name}: the hub's repository holds no .nemo file.")
    return found[0]
