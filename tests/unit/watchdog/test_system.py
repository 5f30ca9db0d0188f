"""What the operating system is asked to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nest_ssl.watchdog.system import say


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux")
def test_a_process_that_kills_its_own_family_survives() -> None:
    """Under torchrun the monitor is a child of a rank that it has to end."""
    code = (
        "import os, subprocess, sys, time\n"
        "child = 'import os; from nest_ssl.watchdog.system import kill_all; '\n"
        "child += 'kill_all({os.getppid()}); print(\"done\")'\n"
        "subprocess.Popen([sys.executable, '-c', child])\n"
        "time.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    stdout, _ = parent.communicate(timeout=30)
    assert parent.returncode == -signal.SIGKILL
    assert stdout == "done\n"


def test_a_signal_handler_can_print_even_if_it_interrupted_another_print(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr("builtins.print", refuse)
    say("nest-ssl: SIGTERM: stopped")
    assert capfd.readouterr().err == "nest-ssl: SIGTERM: stopped\n"
