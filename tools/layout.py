"""How big and how tangled the source is: counts taken from the code itself, and their limits.

    python tools/layout.py        # prints every count next to its limit; exit code 1 if one is exceeded
    python tools/layout.py -v     # also lists what was counted

tests/unit/test_layout.py checks the same limits. What a step or a batch executes is traced, not listed by hand: a file
counts when one of its functions ran.
"""

from __future__ import annotations

import argparse
import ast
import functools
import graphlib
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "nest_ssl"
SMALL = 60
"""A module with fewer lines and a single importer usually belongs in that importer."""


@dataclass(frozen=True)
class Limit:
    """The most of something, and why it is not what the design began with."""

    most: int
    what: str
    reason_for_raise: str = ""


LIMITS: dict[str, Limit] = {
    "files": Limit(
        167,
        "source files",
        "the design said about 160; five are packages' __init__.py; several GPUs added modules/batch_norm.py and "
        "training/sharding.py",
    ),
    "lines": Limit(
        33_700,
        "lines of source",
        "the design said 21,000. The twins and workarounds are gone (no two places share more than 10 lines of logic), "
        "but what replaced Lightning, the trainer's fields, sharding, plugins and the comments of the kernels took "
        "their place (26,000). Several GPUs added 2,700: shapes decided by the plan 500, the GPU's own marks and their "
        "judgement 600, sharded checkpoints 500, `fit` on the real step 350, GPUs of ranks 300, the captured step 450. "
        "Closing the review added 2,500: checkpoints in the background and their checksums 600, monitors of many nodes "
        "600, ranges of all keys 600, bad data and indexes 400, SLURM 200. Answers to 13,400 trials of bad input: "
        "2,500",
    ),
    "folder": Limit(17, "modules side by side in one folder", "training/sharding.py: FSDP2 was half of parallel.py"),
    "one_importer": Limit(5, f"modules under {SMALL} lines with a single importer"),
    "chain": Limit(14, "modules in the longest import chain, lazy imports included"),
    "cycles": Limit(0, "import cycles, lazy imports included"),
    "step": Limit(
        19,
        "files executed in one eager CPU step, from batch in hand to updated weights",
        "training/metrics.py: counts and means of a batch are part of the step, so that its CUDA graph holds them",
    ),
    "step_in_training": Limit(6, "of them in training/"),
    "utterance": Limit(10, "files executed from manifest line to batch, noise and augmentation included"),
}
"""Every limit of the layout. To raise one, write the reason here: it is the only place."""


@dataclass(frozen=True)
class Count:
    """A number and what it is made of, to look at when it is too high."""

    value: int
    found: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", "--verbose", action="store_true", help="list what was counted")
    options = parser.parse_args()
    sys.path.insert(0, str(SOURCE.parent))
    counts = {name: count() for name, count in COUNTERS.items()}
    for name, limit in LIMITS.items():
        count = counts[name]
        sign = "over" if count.value > limit.most else "ok"
        print(f"{sign:5}{count.value:7,} of {limit.most:6,}  {limit.what}")
        for line in count.found if options.verbose else []:
            print(f"{'':26}{line}")
    return int(any(counts[name].value > limit.most for name, limit in LIMITS.items()))


# ---- sizes ----


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def count_files(source: Path = SOURCE) -> Count:
    return Count(len(list(source.rglob("*.py"))))


def count_lines(source: Path = SOURCE) -> Count:
    return Count(sum(map(num_lines, source.rglob("*.py"))))


def fullest_folder(source: Path = SOURCE) -> Count:
    """The folder with the most modules; `__init__.py` is not one."""
    folders = Counter(path.parent for path in source.rglob("*.py") if path.name != "__init__.py")
    ranked = [f"{num} {folder.relative_to(source)}" for folder, num in folders.most_common(5)]
    return Count(max(folders.values()), ranked)


# ---- who imports whom ----


@dataclass(frozen=True)
class Import:
    """`from module import name`; `import module` has no name."""

    module: str
    name: str | None
    types_only: bool
    """Within `if TYPE_CHECKING:`, hence never executed."""


def imports_in(tree: ast.AST, package: str, types_only: bool = False) -> Iterator[Import]:
    """All imports of `package`'s own modules, also those within functions and `import_module("…")` calls."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from imports_in(ast.Module([child], []), package, types_only=True)
            for child in node.orelse:
                yield from imports_in(ast.Module([child], []), package, types_only)
            continue
        found: list[tuple[str, str | None]]
        if isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno}: a relative import; write it from {package} on.")
            found = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        else:
            found = [(name, None) for name in _import_module_argument(node)]
            yield from imports_in(node, package, types_only)
        yield from (Import(m, name, types_only) for m, name in found if m.split(".")[0] == package)


def _import_module_argument(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


@dataclass
class ImportGraph:
    """Modules by dotted name, and what each of them imports when everything in it has run."""

    paths: dict[str, Path]
    edges: dict[str, set[str]]

    def is_package(self, module: str) -> bool:
        return self.paths[module].name == "__init__.py"

    def importers(self, module: str) -> list[str]:
        return sorted(importer for importer, imported in self.edges.items() if module in imported)


@functools.cache
def import_graph(source: Path = SOURCE) -> ImportGraph:
    """The graph of all modules under `source`.

    A name that comes from a package (`from nest_ssl.data import build_loader`) leads to the module that defines it,
    whether the package's `__init__.py` imports it at once or when it is asked for. An `__init__.py` that imports at
    once is itself on the way, for importers outside of it.
    """
    paths = {_dotted(path, source): path for path in sorted(source.rglob("*.py"))}
    imports = {module: list(imports_in(ast.parse(path.read_text()), source.name)) for module, path in paths.items()}

    def home(module: str, name: str | None) -> str:
        if name is None:
            return module
        if f"{module}.{name}" in paths:
            return f"{module}.{name}"
        passed_on = [found for found in imports.get(module, []) if found.name == name]
        is_package = module in paths and paths[module].name == "__init__.py"
        return home(passed_on[0].module, name) if is_package and passed_on else module

    edges: dict[str, set[str]] = {}
    for importer, found in imports.items():
        targets = {home(one.module, one.name) for one in found if not one.types_only}
        packages = {parent for target in targets for parent in _parents(target)} - {importer, *_parents(importer)}
        edges[importer] = (targets | packages) & paths.keys() - {importer}
    return ImportGraph(paths, edges)


def _dotted(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__")


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def one_importer_modules(source: Path = SOURCE) -> Count:
    """Small modules with a single importer. An `__init__.py` is neither a module nor an importer.

    A program's entry (`__main__.py`) and modules nobody imports are not meant: they have no importer to move to.
    """
    graph = import_graph(source)
    found = []
    for module, path in graph.paths.items():
        importers = [one for one in graph.importers(module) if not graph.is_package(one)]
        if not graph.is_package(module) and len(importers) == 1 and num_lines(path) < SMALL:
            found.append(f"{module} ({num_lines(path)} lines), imported by {importers[0]}")
    return Count(len(found), found)


def longest_chain(source: Path = SOURCE) -> Count:
    """The longest way from a module along its imports; an `__init__.py` on it does not count."""
    graph = import_graph(source)
    if cycle := import_cycles(source).found:
        return Count(len(graph.paths), [f"a cycle has no longest chain: {cycle[0]}"])
    below: dict[str, tuple[str, ...]] = {}
    for module in graphlib.TopologicalSorter(graph.edges).static_order():
        deepest = max((below[other] for other in sorted(graph.edges[module])), key=len, default=())
        below[module] = deepest if graph.is_package(module) else (module, *deepest)
    chain = max(below.values(), key=len)
    return Count(len(chain), list(chain))


def import_cycles(source: Path = SOURCE) -> Count:
    """One cycle, if there are any: each module in it imports the next."""
    try:
        graphlib.TopologicalSorter(import_graph(source).edges).prepare()
    except graphlib.CycleError as error:
        return Count(1, [" → ".join(reversed(error.args[1]))])
    return Count(0)


# ---- what runs ----


def files_executed(run: Callable[[], object], source: Path = SOURCE) -> list[str]:
    """The files under `source` of which a function ran in `run`, which is called once before: imports do not count."""
    import torch

    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            ran.add(frame.f_code.co_filename)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # files are read by as many threads as torch has; the profiler sees only new ones
    try:
        run()
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    finally:
        torch.set_num_threads(num_threads)
    paths = {Path(name).resolve() for name in ran if not name.startswith("<")}
    return sorted(str(path.relative_to(source)) for path in paths if path.is_relative_to(source))


SMALL_MODEL = [
    "model.encoder.d_model=32",
    "model.encoder.n_layers=2",
    "model.encoder.n_heads=4",
    "model.encoder.subsampling_conv_channels=8",
    "model.num_classes=64",
    "model.optim.sched.warmup_steps=20",
    "trainer.accelerator=cpu",
    "trainer.gradient_clip_val=1.0",
    "trainer.max_steps=10",
]


def training_step() -> Callable[[], object]:
    """One update of a small model on a batch in hand; the only place that knows how to make one."""
    import torch

    from nest_ssl import EncDecDenoiseMaskedTokenPredModel
    from nest_ssl.config import compose
    from nest_ssl.data import AudioNoiseBatch
    from nest_ssl.data.randomness import Use, seed_everything
    from nest_ssl.fast.engine import accelerate
    from nest_ssl.training.optimizers import build_optimizer
    from nest_ssl.training.parallel import World
    from nest_ssl.training.schedules import build_schedule
    from nest_ssl.training.step import Clipping, TrainStep
    from nest_ssl.training.watching import Watch

    cfg = compose(overrides=SMALL_MODEL)
    model = EncDecDenoiseMaskedTokenPredModel(cfg.model).train()
    optimizer = build_optimizer(model, cfg.model.optim)
    assert cfg.model.optim.sched is not None
    schedule = build_schedule(optimizer, cfg.model.optim.sched, cfg.trainer.max_steps)
    update = TrainStep(
        model,
        accelerate(model),
        optimizer,
        schedule,
        World(),
        Watch(),
        clipping=Clipping(cfg.trainer.gradient_clip_val),
    )
    length_B = torch.tensor([32_000, 28_000])
    batch = AudioNoiseBatch(
        audio=0.1 * torch.randn(2, 32_000),
        audio_len=length_B,
        noise=0.01 * torch.randn(2, 32_000),
        noise_len=length_B,
        noisy_audio_len=length_B,
    )

    def step() -> None:
        seed_everything(cfg.seed, Use.TRAIN, 0, 0, 0)
        update(batch.to("cpu").mixed(), begins=True, updates=True, step=0)

    return step


@functools.cache
def files_of_step() -> list[str]:
    return files_executed(training_step())


def step_files() -> Count:
    return Count(len(files_of_step()), files_of_step())


def step_files_in_training() -> Count:
    found = [name for name in files_of_step() if name.startswith("training/")]
    return Count(len(found), found)


def make_audio(folder: Path, num_files: int = 6) -> None:
    """Speech and noise manifests; every second file has to be resampled."""
    import numpy as np
    import soundfile

    rng = np.random.default_rng(0)
    lines = []
    for number in range(num_files):
        rate = (16_000, 8_000)[number % 2]
        soundfile.write(folder / f"{number}.wav", 0.1 * rng.standard_normal(2 * rate), rate)
        lines.append(json.dumps({"audio_filepath": f"{number}.wav", "duration": 2.0}) + "\n")
    (folder / "speech.jsonl").write_text("".join(lines[2:]))
    (folder / "noise.jsonl").write_text("".join(lines[:2]))


def utterance_files() -> Count:
    """A batch that the plan has described, made in this process: read, resample, draw noise, augment, pad, mix."""
    from nest_ssl.config import DatasetConfig
    from nest_ssl.config.data import AugmentorConfig
    from nest_ssl.data import build_loader

    with tempfile.TemporaryDirectory() as folder:
        make_audio(Path(folder))
        config = DatasetConfig(
            manifest_filepath=f"{folder}/speech.jsonl",
            noise_manifest=f"{folder}/noise.jsonl",
            sample_rate=16_000,
            batch_size=4,
            batch_augmentor=AugmentorConfig(prob=1.0, noise_ratio=0.5),
        )
        loader = build_loader(config)
        described = next(iter(loader.sampler))
        collate: Callable[[Any], object] = loader.collate_fn
        found = files_executed(lambda: collate(loader.dataset[described]))
    return Count(len(found), found)


COUNTERS: dict[str, Callable[[], Count]] = {
    "files": count_files,
    "lines": count_lines,
    "folder": fullest_folder,
    "one_importer": one_importer_modules,
    "chain": longest_chain,
    "cycles": import_cycles,
    "step": step_files,
    "step_in_training": step_files_in_training,
    "utterance": utterance_files,
}

if __name__ == "__main__":
    sys.exit(main())
