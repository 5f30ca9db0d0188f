from __future__ import annotations

from nest_ssl.inspect.inspect import Inspection, InspectOptions, inspect_data
from nest_ssl.inspect.page import render_page
from tests.unit.drawing.page_parser import Page, assert_needs_no_network
from tests.unit.inspect.conftest import Speech


def inspect(speech: Speech, *overrides: str, num_examples: int = 1) -> Inspection:
    return inspect_data(speech.config(overrides), InspectOptions(batch_sizes=[4], num_examples=num_examples))


def test_the_page_contains_all_its_pictures_and_needs_no_network(speech: Speech) -> None:
    text = render_page(inspect(speech))
    page = assert_needs_no_network(text)
    assert len(page.addresses) == 1 + 3 * 3  # the colours of the legend; three features of three utterances


def test_the_same_data_gives_the_same_page_to_the_byte(speech: Speech) -> None:
    assert render_page(inspect(speech)) == render_page(inspect(speech))


def test_the_page_says_what_was_found(speech: Speech) -> None:
    found = inspect(speech)
    text = render_page(found)
    assert "speech.jsonl" in text
    assert f"{found.speech.hours:,.2f} h" in text
    assert "FLAC/PCM_16" in text
    assert "8,000 Hz" in text
    for row in found.batchings[4]:
        assert f"<b>{100 * row.filling.padding_share:.1f} %</b>" in text
    for utterance in found.examples[0].utterances[:3]:
        assert utterance.name in text
        assert utterance.ratio_db is not None
        assert f"{utterance.ratio_db:+.1f} dB" in text


def test_names_of_files_cannot_put_tags_into_the_page(speech: Speech) -> None:
    evil = "<script>alert(1)</script>"
    (speech.folder / "<b>x.wav").write_bytes((speech.folder / "1.wav").read_bytes())
    lines = [{"audio_filepath": name, "duration": 1.2} for name in ("<b>x.wav", f"{evil}.wav", "2.wav", "3.wav")]
    config = speech.config(manifest=speech.other("evil.jsonl", lines))
    text = render_page(inspect_data(config, InspectOptions(batch_sizes=[4])))
    assert evil not in text
    assert "<b>x.wav" not in text
    assert "&lt;b&gt;x.wav" in text


def test_a_page_without_examples_and_durations_is_complete(speech: Speech) -> None:
    lines = [{"audio_filepath": f"gone_{i}.wav"} for i in range(3)]
    config = speech.config(manifest=speech.other("gone.jsonl", lines))
    text = render_page(inspect_data(config, InspectOptions(batch_sizes=[4])))
    assert Page(text).open == []
    assert "No duration is known" in text
