from __future__ import annotations

import dataclasses
import gc
import html
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from nest_ssl import load
from nest_ssl.data.batch.collate import needed
from nest_ssl.data.build import open_batches
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.report import examples as run_examples
from nest_ssl.report.charts import TOP
from nest_ssl.report.examples import examine
from nest_ssl.report.report import duration, look_at_checkpoint, make_report, open_run, write_run_report
from tests.helpers import tiny_model
from tests.unit.drawing.page_parser import assert_needs_no_network
from tests.unit.report.fake_run import COMMIT, make_run, remove_audio, rows, write_metrics

SECTIONS = ("At a glance", "Curves", "Codebook use", "One utterance", "Logged metrics", "Configuration")
CHARTS = (
    *("Loss", "Masked tokens predicted correctly", "Learning rate", "Speed", "Time and compute lost", "Masked tokens"),
    *("Codes used in a batch", "Entropy of a batch’s codes"),
)


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_examples, "MAX_PASSES", 2)


def report(run: Path) -> str:
    return html.unescape(write_run_report(run).read_text(encoding="utf-8"))


def test_the_page_contains_everything_and_needs_no_network(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = write_run_report(run)
    assert path == run / "report.html"
    text = path.read_text(encoding="utf-8")
    page = assert_needs_no_network(text)
    assert len(page.addresses) == 1 + 3  # the colours of the legend; clean, noisy and masked features
    text = html.unescape(text)
    for section in SECTIONS:
        assert section in text
    for chart in (*CHARTS, "Use of each code"):
        assert f"<h3>{chart}</h3>" in text
        assert f'aria-label="{chart}"' in text
    assert "<h2>Notes</h2>" not in text
    assert "prefers-color-scheme: dark" in text


def test_numbers_of_the_page_are_those_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    text, logged = report(run), rows(20)
    trained, validated = [row for row in logged if "train_loss" in row], [row for row in logged if "val_loss" in row]
    for name, values in (
        ("train_loss", [row["train_loss"] for row in trained]),
        ("val_loss", [row["val_loss"] for row in validated]),
    ):
        cells = f'{len(values)}</td><td class="n">{values[0]:.4f}</td><td class="n">{values[-1]:.4f}</td>'
        assert f'<code>{name}</code></td><td class="n">{cells}' in text
    assert f"{100 * trained[-1]['accuracy']:.2f} %" in text
    assert f"<b>{validated[-1]['val_loss']:.4f}</b><span>validation loss" in text
    assert f"The validation loss is {validated[-1]['val_loss']:.3f} at step 19" in text
    assert "ln 64 = 4.159" in text
    assert '<code>other_val_loss</code></td><td class="n">4</td>' in text
    assert "4.2345 (step 4)" in text  # of one of several validation sets
    assert "7.89 %" in text
    assert "<b>20</b><span>of 20 steps" in text
    assert "<b>≈ 13 min 20 s</b><span>of audio processed" in text  # 20 steps of 40 s
    assert "<b>23 s</b><span>first to last row" in text  # 24 rows, one second apart
    assert "2023-11-14 22:13 UTC" in text
    assert f"{COMMIT[:12]} with changes" in text
    model = load(run / "checkpoints" / "fake.nemo")
    assert f"<b>{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M</b>" in text
    assert "mask_prob: 0.05" in text


def test_the_verdict_for_the_terminal_is_that_of_the_page(tmp_path: Path) -> None:
    report = make_report(make_run(tmp_path))
    text = html.unescape(report.path.read_text(encoding="utf-8"))
    assert f"<h2>{report.verdict.headline}</h2>" in text
    assert len(report.verdict.sentences) == 3
    for sentence in report.verdict.sentences:
        assert f"<p>{sentence}</p>" in text


def test_the_same_run_gives_the_same_page_and_leaves_torchs_generator_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = torch.get_rng_state()
    first = write_run_report(run).read_bytes()
    assert torch.equal(before, torch.get_rng_state())
    assert write_run_report(run, output=tmp_path / "other.html").read_bytes() == first


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.num_books=3",),
        ("model.squeeze_single=true",),
        ("model.mask_position=post_conv",),
        ("model.encoder.causal_downsampling=true",),
        ("model.masking.allow_overlap=false", "model.masking.mask_prob=0.3"),
    ],
)
def test_every_kind_of_model_is_drawn(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = make_run(tmp_path, *overrides)
    look = look_at_checkpoint(open_run(run))
    assert look.problem == ""
    assert look.examined is not None
    example = look.examined.example
    assert example is not None
    assert (example.masked_MT is None) == ("post_conv" in overrides[0])
    assert np.array_equal(example.rank_SH == 1, example.true_SH == example.predicted_SH)
    text = report(run)
    assert_needs_no_network(text)
    num_books = example.true_SH.shape[1]
    assert text.count("the true code ranks ") == num_books * np.count_nonzero(example.masked_S)
    assert (">predicted 3<" in text) == (num_books == 3)


def test_no_file_of_the_validation_data_is_left_open(tmp_path: Path) -> None:
    _, dataset = open_run(make_run(tmp_path)).dataset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for batches in (run_examples._batches(dataset, 0), run_examples._batches(dataset, 0)):
            next(batches)
            batches.close()  # type: ignore[attr-defined]
        del batches
        gc.collect()
    assert [str(one.message) for one in caught if one.category is ResourceWarning] == []


def test_predictions_are_those_of_forward_on_the_validation_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_examples, "MAX_PASSES", 1)
    run = open_run(make_run(tmp_path))
    assert run.config is not None
    assert run.checkpoint is not None
    audio, dataset = run.dataset()
    assert audio == "validation"
    dataset = dataclasses.replace(dataset, batch_size=6)  # all of it in one batch
    model = load(run.checkpoint)
    assert isinstance(model, EncDecDenoiseMaskedTokenPredModel)
    found = examine(model, dataset, seed=3).predictions
    (batch,) = open_batches(dataset, 3, same_every_epoch=True)
    with torch.no_grad():
        log_probs, _, masks, tokens = model(
            input_signal=needed(batch.audio),
            input_signal_length=needed(batch.audio_len),
            noisy_input_signal=needed(batch.noisy_audio),
            noisy_input_signal_length=needed(batch.audio_len),
            apply_mask=True,
            generator=torch.Generator().manual_seed(3),
        )
        loss = model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens)
    masked = model.loss.masked_tokens(masks[:, 0])
    num = min(masked.shape[1], tokens.shape[1], log_probs.shape[1])
    masked = masked[:, :num]
    true, predicted = tokens[:, :num][masked][:, 0], log_probs[:, :num][masked][..., 0]
    assert found.num_masked == int(masked.sum()) > 0
    assert found.loss == pytest.approx(float(loss), rel=1e-6)
    assert found.accuracy == pytest.approx(float((predicted.argmax(1) == true).float().mean()))
    in_top = (predicted.topk(TOP, dim=1).indices == true[:, None]).any(1)
    assert found.top_accuracy == pytest.approx(float(in_top.float().mean()))
    assert found.most_frequent == pytest.approx(int(true.bincount().max()) / len(true))
    assert found.audio_s == pytest.approx(float(needed(batch.audio_len).sum()) / 16_000)


def test_a_small_set_is_evaluated_again_with_other_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_examples, "MAX_AUDIO_S", 40.0)
    monkeypatch.setattr(run_examples, "MAX_PASSES", 20)
    run = open_run(make_run(tmp_path))
    look = look_at_checkpoint(run)
    assert look.examined is not None
    several = look.examined.predictions
    assert several.num_passes == 6  # of 6 utterances of about 1.25 s, until 40 s are reached
    monkeypatch.setattr(run_examples, "MAX_PASSES", 1)
    look = look_at_checkpoint(run)
    assert look.examined is not None
    once = look.examined.predictions
    assert several.num_masked > 3 * once.num_masked
    assert several.num_utterances == once.num_utterances == 6
    assert np.array_equal(several.used_KH, once.used_KH)
    assert several.audio_s == once.audio_s


def test_without_noise_the_noisy_features_are_the_clean_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path, "model.validation_ds.noise_manifest=null", "model.validation_ds.batch_augmentor=null")
    assert "(no noise)" in report(run)


def test_without_validation_the_training_data_is_used_and_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, "model.validation_ds.manifest_filepath=null")
    write_metrics(run / "metrics.csv", [row for row in rows(20) if "val_loss" not in row])
    (run / "checkpoints" / "fake.nemo").rename(tmp_path / "fake.nemo")
    assert "of the masked tokens in the last training batches are predicted correctly" in report(run)
    (tmp_path / "fake.nemo").rename(run / "checkpoints" / "fake.nemo")
    text = report(run)
    assert "6 validation utterances" not in text
    assert "training utterances" in text
    assert "mean of the last 10 logged steps; there was no validation" in text


def test_a_run_without_a_checkpoint_has_curves_and_says_why_there_is_no_picture(tmp_path: Path) -> None:
    text = report(make_run(tmp_path, checkpoint=None))
    assert_needs_no_network(text)
    assert "No picture: " in text
    assert "there is no .nemo or .ckpt file yet" in text
    assert text.count('<svg viewBox="0 0 460 230"') == len(CHARTS)
    accuracy = rows(20)[-1]["val_accuracy"]
    assert f"{accuracy:.1%} of the masked tokens in validation are predicted correctly" in text
    assert "always predicting the most frequent code gives 7.9%" in text
    assert ">validation’s most frequent code</text>" in text


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint=None)
    (run / "checkpoints" / "last.ckpt").write_bytes(b"half of it")
    assert "last.ckpt: not a readable training checkpoint" in report(run)


def test_a_checkpoint_of_another_model_is_not_evaluated(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    other = tiny_model({"encoder.d_model": 16})
    other.save_to(run / "checkpoints" / "fake.nemo")
    assert "fake.nemo: not the model that hparams.yaml describes: " in report(run)


def test_missing_audio_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    remove_audio(run)
    text = report(run)
    assert "No picture: none of these neighbours in the plan can be read" in text
    assert "No such file or directory" in text
    (tmp_path / "corpus" / "valid.jsonl").unlink()
    assert "valid.jsonl" in report(run).partition("No picture: ")[2][:200]


def test_the_newest_checkpoint_is_used(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    older, newer = run / "checkpoints" / "fake.nemo", run / "checkpoints" / "last.ckpt"
    newer.write_bytes(b"")
    for path, time_s in ((older, 1000), (newer, 2000)):
        os.utime(path, (time_s, time_s))
    assert open_run(run).checkpoint == newer
    os.utime(older, (2000, 2000))
    assert open_run(run).checkpoint == older


def test_a_missing_folder_and_a_folder_that_is_not_a_run_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        write_run_report(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a folder"):
        write_run_report(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="contains neither metrics.csv nor hparams.yaml"):
        write_run_report(tmp_path / "empty")
    run = make_run(tmp_path, checkpoint=None)
    with pytest.raises(ValueError, match=f"Runs inside it: {run}"):
        write_run_report(tmp_path)
    assert not list(tmp_path.glob("*/report.html"))
    with pytest.raises(ValueError, match="cannot be written: No such file or directory. Name another file"):
        write_run_report(run, output=tmp_path / "no" / "report.html")


@pytest.mark.parametrize("content", ["", "step,time,train_loss\r\n", "step,ti"])
def test_a_run_that_has_logged_nothing_says_so(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path)
    (run / "metrics.csv").write_text(content)
    text = report(run)
    assert_needs_no_network(text)
    assert "metrics.csv: the file is empty so far." in text or "metrics.csv: no step has been logged yet." in text
    assert "<b>0</b><span>of 20 steps" in text
    (run / "metrics.csv").unlink()
    assert "metrics.csv: no such file, so nothing has been logged yet." in report(run)


def test_a_last_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    whole = (run / "metrics.csv").read_bytes()
    (run / "metrics.csv").write_bytes(whole + b"20,1700000020,4.0")  # or was it 4.01?
    run_read = open_run(run)
    assert run_read.notes == ["metrics.csv: the last line is cut off and was left out."]
    assert run_read.metrics.num_steps == 20
    assert run_read.metrics.series("train_loss").last == rows(20)[-2]["train_loss"]


def test_a_table_that_is_not_of_a_run_is_an_error_and_odd_values_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'step'"):
        write_run_report(run)
    (run / "metrics.csv").write_text("step,train_loss\n0,4.5\n1,what\nx,4\n2,\n3\n4,4.25,7\n")
    metrics = open_run(run).metrics
    assert metrics.notes == ["metrics.csv: 2 values are not numbers and were left out."]
    assert metrics.series("train_loss").values_R.tolist() == [4.5, 4.25]
    assert metrics.num_steps == 5


def test_damaged_times_and_values_do_not_break_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint=None)
    (run / "metrics.csv").write_text("step,time,train_loss\n0,1e300,4\n1,-1e15,1e308\n2,1700000000,-1e308\n3,nan,3\n")
    text = report(run)
    assert_needs_no_network(text)
    assert "2023-11-14 22:13 UTC to 2023-11-14 22:13 UTC" in text
    assert "× not a number: 2" in text


def test_losses_that_are_not_numbers_are_reported_and_drawn_as_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    logged = rows(20)
    for row in logged:
        if "train_loss" in row and row["step"] in (7, 8, 19):
            row["train_loss"] = float("nan")
    write_metrics(run / "metrics.csv", logged)
    text = report(run)
    assert "<h2>The loss is not a number</h2>" in text
    assert "It is NaN or infinite at 3 of 20 logged steps, first at step 7." in text
    assert "× not a number: 3" in text
    assert 'd="Mnan' not in text
    for row in logged:
        row["train_loss"] = float("inf")
    write_metrics(run / "metrics.csv", logged)
    assert "no value is a number" not in (text := report(run))  # there is a validation loss
    assert "at 24 of 24 logged steps, first at step 0." in text


def test_a_configuration_that_cannot_be_read_leaves_the_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "hparams.yaml").write_text("model: [")
    text = report(run)
    assert "hparams.yaml: cannot be used: " in text
    assert "No picture: hparams.yaml names no data." in text
    assert "<h1>fake</h1>" in text
    (run / "hparams.yaml").unlink()
    assert "hparams.yaml: no such file" in report(run)
    (run / "hparams.yaml").mkdir()
    assert "hparams.yaml: is not a regular file" in report(run)


def test_names_from_outside_cannot_put_tags_into_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, "exp_manager.name='<script>x</script>'", checkpoint=None)
    assert "<script>" not in write_run_report(run).read_text(encoding="utf-8")


def test_a_hundred_thousand_rows_fit_on_a_small_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint=None)
    logged = rows(100_000, validate_every=500)
    logged[54_321]["train_loss"] = 99.0
    write_metrics(run / "metrics.csv", logged)
    text = report(run)
    assert len(text) < 500_000
    assert "<b>100,000</b>" in text
    assert 'text-anchor="end">100</text>' in text  # the one peak is drawn, and the axis reaches it


@pytest.mark.parametrize(
    ("devices", "nodes", "ranks"), [("2", 3, 6), ("[0,3]", 1, 2), ("auto", 1, None), ("-1", 2, None), ("'0,1'", 1, 2)]
)
def test_ranks_are_counted_where_the_configuration_says_how_many(
    tmp_path: Path, devices: str, nodes: int, ranks: int | None
) -> None:
    overrides = (f"trainer.devices={devices}", f"trainer.num_nodes={nodes}")
    run = make_run(tmp_path, *overrides, checkpoint=None)
    assert open_run(run).num_ranks == ranks
    assert ("of audio processed by each rank" in report(run)) == (ranks is None)


def test_durations_have_two_units() -> None:
    texts = [duration(seconds) for seconds in (0, 12.4, 200, 3900, 3600, 90_000)]
    assert texts == ["0 s", "12 s", "3 min 20 s", "1 h 5 min", "1 h 0 min", "1 d 1 h"]
