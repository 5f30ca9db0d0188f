from __future__ import annotations

import gzip
import io
import os
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nest_ssl import CheckpointError, load
from nest_ssl.model import effective_sections
from nest_ssl.nemo_file import CONFIG_NAME, WEIGHTS_NAME, read_nemo, write_nemo
from tests.helpers import noise_batch, tiny_model

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"


def archive(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def members_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {
            Path(member.name).name: extracted.read()
            for member in tar
            if member.isreg() and (extracted := tar.extractfile(member)) is not None
        }


@pytest.fixture(scope="module")
def good() -> dict[str, bytes]:
    return members_of(GOLDEN / "pre_conv.nemo")


@pytest.mark.parametrize("overrides", [{}, {"mask_position": "post_conv"}, {"encoder.untie_biases": False}])
def test_a_saved_model_comes_back_the_same(tmp_path: Path, overrides: dict[str, object]) -> None:
    model = tiny_model(overrides).eval()
    model.save_to(tmp_path / "model.nemo")
    again = load(tmp_path / "model.nemo")
    assert not again.training
    assert effective_sections(again.cfg) == effective_sections(model.cfg)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    batch = noise_batch([16_000, 9_000])
    assert torch.equal(again(**batch)[0], model(**batch)[0])


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.nemo")))
def test_nemos_files_survive_a_round_trip(tmp_path: Path, name: str) -> None:
    model = load(GOLDEN / f"{name}.nemo")
    model.save_to(tmp_path / "again.nemo")
    again = load(tmp_path / "again.nemo")
    assert again.cfg == model.cfg
    assert again.state_dict().keys() == read_nemo(GOLDEN / f"{name}.nemo").weights.keys()
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))


def test_compressed_archives_are_read(tmp_path: Path, good: dict[str, bytes]) -> None:
    path = archive(tmp_path / "model.nemo", good, "w:gz")
    plain = load(GOLDEN / "pre_conv.nemo").state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in load(path).state_dict().items())


@pytest.mark.parametrize("place", [-6, -1])
def test_a_compressed_archive_that_fails_the_checksum_at_its_end_is_refused(
    tmp_path: Path, good: dict[str, bytes], place: int
) -> None:
    path = archive(tmp_path / "model.nemo", good, "w:gz")
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.nemo: not a readable \.nemo file: (CRC|Incorrect length)"):
        load(path)


def test_a_bomb_behind_a_compressed_archive_is_refused(tmp_path: Path, good: dict[str, bytes]) -> None:
    path = archive(tmp_path / "model.nemo", good, "w:gz")
    path.write_bytes(path.read_bytes() + gzip.compress(bytes(200_000_000)))
    with pytest.raises(CheckpointError, match=r"model\.nemo: would unpack to"):
        load(path)


def test_member_names_may_have_a_leading_dot_or_not(tmp_path: Path, good: dict[str, bytes]) -> None:
    load(archive(tmp_path / "plain.nemo", good))
    load(archive(tmp_path / "dotted.nemo", {f"./{name}": data for name, data in good.items()}))


def test_other_members_are_ignored(tmp_path: Path, good: dict[str, bytes]) -> None:
    load(archive(tmp_path / "model.nemo", {**good, "tokenizer.model": b"xyz"}))


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil.txt", "a/../../evil.txt", "..\\evil.txt"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, good: dict[str, bytes], name: str) -> None:
    path = archive(tmp_path / "model.nemo", {**good, name: b"evil"})
    with pytest.raises(CheckpointError, match=r"model\.nemo: contains .*outside its folder"):
        load(path)


def test_control_characters_in_names_are_written_out(tmp_path: Path, good: dict[str, bytes]) -> None:
    path = archive(tmp_path / "model.nemo", {**good, "../a\nb": b""})
    with pytest.raises(CheckpointError, match=r"contains '\.\./a\\nb', a path outside"):
        load(path)
    path = archive(tmp_path / "model.nemo", {**good, WEIGHTS_NAME: _torch_saved({"a\nb\x1b[31m": torch.zeros(1)})})
    with pytest.raises(CheckpointError, match=r"a name has control characters: 'a\\nb\\x1b\[31m'; refused"):
        load(path)
    path = archive(tmp_path / "model.nemo", {**good, CONFIG_NAME: b'target: "a\\nb"'})
    with pytest.raises(CheckpointError, match=r"contains a 'a\\nb', not a NEST model"):
        load(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, good: dict[str, bytes], kind: bytes) -> None:
    path = archive(tmp_path / "model.nemo", good)
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        load(path)


def test_a_bomb_is_refused_before_it_is_read(tmp_path: Path, good: dict[str, bytes]) -> None:
    path = archive(tmp_path / "bomb.nemo", {**good, WEIGHTS_NAME: bytes(200_000_000)}, "w:gz")
    assert path.stat().st_size < 1_000_000
    with pytest.raises(CheckpointError, match="would unpack to"):
        load(path)


def test_a_yaml_that_expands_without_limit_is_refused(tmp_path: Path, good: dict[str, bytes]) -> None:
    laughs = b"a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n"
    path = archive(tmp_path / "model.nemo", {**good, CONFIG_NAME: laughs})
    with pytest.raises(CheckpointError, match="aliases"):
        load(path)


def test_a_key_that_occurs_twice_in_a_configuration_is_refused_by_name(tmp_path: Path, good: dict[str, bytes]) -> None:
    twice = good[CONFIG_NAME].replace(b"  d_model: ", b"  d_model: 64\n  d_model: ")
    assert twice != good[CONFIG_NAME]
    path = archive(tmp_path / "model.nemo", {**good, CONFIG_NAME: twice})
    with pytest.raises(CheckpointError, match=r"model\.nemo: its .* the key 'd_model' occurs twice, again in line \d+"):
        load(path)
    merged = good[CONFIG_NAME] + b"\nnotes: {<<: {a: 1}, a: 2}\n"
    with pytest.raises(CheckpointError, match=r"model\.notes: no such key"):  # yaml's merges are no twins
        load(archive(tmp_path / "merged.nemo", {**good, CONFIG_NAME: merged}))


def test_a_configuration_that_was_changed_is_noticed(tmp_path: Path) -> None:
    """A digit that changes makes other features, and nothing else would show it."""
    path = tmp_path / "model.nemo"
    tiny_model().save_to(path)
    load(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"preemph: 0.97", b"preemph: 0.96"))
    with pytest.raises(CheckpointError, match=r"model\.nemo: is damaged: its model_config\.yaml fails its checksum"):
        load(path)


def test_a_configuration_in_utf_16_is_refused(tmp_path: Path, good: dict[str, bytes]) -> None:
    text = (good[CONFIG_NAME].decode() + "\nx: ${oc.env:HOME}\n").encode("utf-16")
    with pytest.raises(CheckpointError, match=r"model\.nemo: its model_config\.yaml is not valid yaml: 'utf-8' codec"):
        load(archive(tmp_path / "model.nemo", {**good, CONFIG_NAME: text}))


def test_weights_that_contain_code_are_refused(tmp_path: Path, good: dict[str, bytes]) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    for data in (pickle.dumps({"x": Evil()}), _torch_saved({"x": Evil()})):
        path = archive(tmp_path / "model.nemo", {**good, WEIGHTS_NAME: data})
        with pytest.raises(CheckpointError, match="cannot be read as weights"):
            load(path)
    assert not marker.exists()


def _torch_saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_file_gives_one_error_that_names_it(
    tmp_path: Path, good: dict[str, bytes], share: float, compressed: bool
) -> None:
    whole = archive(tmp_path / "whole.nemo", good).read_bytes()
    whole = gzip.compress(whole) if compressed else whole.rstrip(b"\0")
    path = tmp_path / "cut.nemo"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match=r"cut\.nemo"):
        load(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"hello", "not a readable .nemo file"),
        (b"PK\x03\x04" + bytes(1000), "not a readable training checkpoint"),
        (bytes(range(1, 100)) * 1000, "not a readable .nemo file"),
    ],
)
def test_a_foreign_file_gives_one_error_that_names_it(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "foreign.nemo"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="foreign.nemo") as raised:
        load(path)
    assert words in str(raised.value)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing.nemo: no such file"):
        load(tmp_path / "nothing.nemo")
    with pytest.raises(CheckpointError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        load(tmp_path / ("x" * 5000 + ".nemo"))


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
@pytest.mark.parametrize("suffix", [".nemo", ".ckpt"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pipe{suffix}"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({CONFIG_NAME: None}, f"it has no {CONFIG_NAME}"),
        ({WEIGHTS_NAME: None}, f"it has no {WEIGHTS_NAME}"),
        ({CONFIG_NAME: b"[1, 2]"}, "is not a mapping"),
        ({CONFIG_NAME: b"a: [1"}, "not valid yaml"),
        ({CONFIG_NAME: b"\xff\xfe\x00"}, "not valid yaml"),
        ({CONFIG_NAME: b"encoder: 3"}, "its configuration cannot be used"),
        ({CONFIG_NAME: b"target: nemo.collections.asr.models.EncDecCTCModel"}, "not a NEST model"),
        ({WEIGHTS_NAME: _torch_saved([1, 2])}, "not a mapping of names to tensors"),
        ({WEIGHTS_NAME: b"garbage"}, "cannot be read as weights"),
        ({WEIGHTS_NAME: b""}, "it ends too early"),
        ({WEIGHTS_NAME: _torch_saved({"x": torch.zeros(3).to_sparse()})}, "'x', which is not a dense"),
        ({WEIGHTS_NAME: _torch_saved({"x": torch.zeros(3, device="meta")})}, "'x', which is not a dense"),
        ({WEIGHTS_NAME: _torch_saved({"x": torch.zeros(1).expand(10**12)})}, "1 are unexpected"),
        ({CONFIG_NAME: b""}, "is not a mapping"),
        ({CONFIG_NAME: b"a: " + b"[" * 5000}, "not valid yaml"),
        ({CONFIG_NAME: b"a: 2001-99-99"}, "not valid yaml"),
        ({CONFIG_NAME: b"a: !!python/object/apply:os.system ['true']"}, "not valid yaml"),
        ({CONFIG_NAME: b"a: ${oc.env:HOME}"}, "calls a resolver"),
        ({CONFIG_NAME: b"a: ${b}\nb: ${a"}, "its configuration cannot be used"),
        ({CONFIG_NAME: b"x" * 2**21}, "2,097,152 bytes; refused"),
    ],
)
def test_wrong_content_is_named(
    tmp_path: Path, good: dict[str, bytes], change: dict[str, bytes | None], words: str
) -> None:
    members = {name: data for name, data in {**good, **change}.items() if data is not None}
    with pytest.raises(CheckpointError) as raised:
        load(archive(tmp_path / "model.nemo", members))
    assert words in str(raised.value)
    assert "model.nemo" in str(raised.value)


def test_two_members_of_one_name_are_refused(tmp_path: Path, good: dict[str, bytes]) -> None:
    path = archive(tmp_path / "model.nemo", {**good, f"./{CONFIG_NAME}": b"encoder: 3"})
    with pytest.raises(CheckpointError, match=f"contains '{CONFIG_NAME}' twice"):
        load(path)


def test_more_members_than_any_model_has_are_refused(tmp_path: Path, good: dict[str, bytes]) -> None:
    path = archive(tmp_path / "model.nemo", {**good, **{f"{i}": b"" for i in range(10_000)}})
    with pytest.raises(CheckpointError, match="more than 10,000 members"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder.d_model": 10**9, "decoder.feat_in": 10**9}, "cannot be used"),
        ({"encoder.n_layers": 10**9}, "n_layers: 1000000000 is more than 1000"),
        ({"quantizer.num_classes": 10**12, "decoder.num_classes": 10**12}, "num_classes: .* is more than"),
        ({"quantizer.num_classes": 10**8, "decoder.num_classes": 10**8}, "have different shapes"),
        ({"preprocessor.n_fft": 2**40}, "n_fft: 1099511627776 is more than"),
        ({"quantizer.num_books": 10**6, "decoder.num_decoders": 10**6}, "num_decoders: 1000000 is more than 10000"),
    ],
)
def test_a_file_that_asks_for_endless_memory_is_refused_before_it_gets_it(
    tmp_path: Path, good: dict[str, bytes], changes: dict[str, int], words: str
) -> None:
    config = yaml.safe_load(good[CONFIG_NAME])
    for key, value in changes.items():
        section, name = key.split(".")
        config[section][name] = value
    path = archive(tmp_path / "model.nemo", {**good, CONFIG_NAME: yaml.safe_dump(config).encode()})
    with pytest.raises(CheckpointError, match=words):
        load(path)


@pytest.mark.parametrize("location", ["cpu", None, torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _: storage])
def test_map_location_may_be_all_that_torch_takes(location: Any) -> None:
    assert load(GOLDEN / "pre_conv.nemo", map_location=location).quantizer.codebooks.device.type == "cpu"


def test_an_18_layer_checkpoint_does_not_load_into_17_layers(tmp_path: Path) -> None:
    deep = tiny_model({"encoder.n_layers": 3})
    path = tmp_path / "deep.nemo"
    deep.save_to(path)
    config = yaml.safe_load(members_of(path)[CONFIG_NAME])
    config["encoder"]["n_layers"] = 2
    write_nemo(path, config, deep.state_dict())
    with pytest.raises(CheckpointError, match=r"unexpected: encoder\.layers\.2"):
        load(path)
    config["encoder"]["n_layers"] = 4
    write_nemo(path, config, deep.state_dict())
    with pytest.raises(CheckpointError, match=r"missing: encoder\.layers\.3"):
        load(path)
    assert load(path, strict=False).encoder.n_layers == 4
    write_nemo(path, config, {f"module.{name}": value for name, value in deep.state_dict().items()})
    with pytest.raises(CheckpointError, match=r"(?s)missing: .*unexpected: module\."):  # as DDP names them
        load(path)


def test_other_shapes_are_listed(tmp_path: Path) -> None:
    model = tiny_model()
    weights = model.state_dict() | {"decoder.decoder_layers.0.bias": torch.zeros(7)}
    path = tmp_path / "model.nemo"
    model.save_to(path)
    write_nemo(path, yaml.safe_load(members_of(path)[CONFIG_NAME]), weights)
    with pytest.raises(CheckpointError, match=r"decoder_layers\.0\.bias: \(7,\) in the file, \(64,\) in the model"):
        load(path)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.nemo"
    model = tiny_model()
    model.save_to(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        model.save_to(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
