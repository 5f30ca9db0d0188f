"""What reaches the terminal."""

from __future__ import annotations

import errno
import logging

import pytest

from nest_ssl.cli.console import make_console, make_table, say
from nest_ssl.cli.main import main
from nest_ssl.config.checks import PlainFormatter, printable, shortened
from nest_ssl.watchdog import system

EVIL = "a\x1b[31m\x9b2Jb\x07\r\u202ec.wav"
SHOWN = r"a\x1b[31m\x9b2Jb\x07\r\u202ec.wav"


def test_escape_codes_are_written_out_and_text_stays() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("\ud800") == r"\ud800"  # printing half of a surrogate pair would fail
    assert printable("Grüße, 你好\t1\n2") == "Grüße, 你好\t1\n2"


def test_no_way_to_the_terminal_passes_escape_codes_on(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    system.say(EVIL)
    console, table = make_console(), make_table(["name"], [])
    table.add_row(EVIL)
    console.print(EVIL)
    console.print(table)
    with pytest.raises(SystemExit):
        main(["info", f"/nowhere/{EVIL}.nemo"])
    printed = "".join(capsys.readouterr())
    assert printed.count(SHOWN) >= 5
    assert "\x1b" not in printed
    assert "\x9b" not in printed


def test_a_log_passes_no_escape_codes_on() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "bad file %s", (EVIL,), None)
    assert PlainFormatter("%(message)s").format(record) == f"bad file {SHOWN}"


def test_a_remote_address_is_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "https://example.org/audio", "--output", "x.jsonl"])
    assert "https://example.org/audio: nest-ssl reads local files only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a.nemo"), "a.nemo: No space left on device"),
        (OSError(errno.ENOSPC, "No space left on device"), "standard output, or a file: No space left on device"),
        (OSError("a.nemo: is damaged."), "a.nemo: is damaged."),
    ],
)
def test_an_error_of_the_system_names_the_file_first(
    error: OSError, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("nest_ssl.cli.main.app", fail)
    with pytest.raises(SystemExit):
        main(["info"])
    assert capsys.readouterr().err == f"nest-ssl: {shown}\n"


def test_a_word_longer_than_any_path_is_shortened() -> None:
    assert shortened(f"a {'b' * 100_000} c") == f"a {'b' * 200}… (100000 characters) c"
    assert shortened("b" * 4096) == "b" * 4096
