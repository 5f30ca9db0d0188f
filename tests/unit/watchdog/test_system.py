"""What the operating system is asked to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nest_ssl.watchdog import system
from nest_ssl.watchdog.system import OomKiller, SlowFiles, python_command, say


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


def kernel(root: Path, version: int, kills: int) -> None:
    """Write what the kernel shows of a job in cgroup /job."""
    folder = root / "sys/fs/cgroup" / ("job" if version == 2 else "memory/job")
    for path in (root / "proc/self", folder):
        path.mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/job\n" if version == 2 else "5:cpu:/\n4:memory:/job\n0::/\n")
    (root / "proc/meminfo").write_text("MemTotal:       64000000 kB\nMemFree: 1 kB\n")
    (root / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 99\n")  # of other jobs
    if version == 2:
        (folder / "memory.events").write_text(f"low 0\noom 5\noom_kill {kills}\noom_group_kill 0\n")
        (folder / "memory.max").write_text("max\n")
    else:
        (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (folder / "memory.limit_in_bytes").write_text("32000000000\n")


@pytest.mark.parametrize(("version", "limit"), [(2, ""), (1, ", of which this job may use 32.0")])
def test_what_the_oom_killer_did_to_this_job_is_told(tmp_path: Path, version: int, limit: str) -> None:
    kernel(tmp_path, version, 3)
    oom_killer = OomKiller(str(tmp_path))
    assert oom_killer.text() == ""
    kernel(tmp_path, version, 4)
    assert oom_killer.text() == (
        f"the kernel's OOM killer has ended 1 process of this job; the host has 64.0 GB of memory{limit}"
    )


def test_without_cgroups_the_machine_is_asked_and_without_either_nothing_is_known(tmp_path: Path) -> None:
    assert OomKiller(str(tmp_path)).text() == ""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 1\n")
    oom_killer = OomKiller(str(tmp_path))
    (tmp_path / "proc/vmstat").write_text("oom_kill 3\n")
    assert "ended 2 processes on this host" in oom_killer.text()


def test_a_file_that_blocks_a_thread_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with SlowFiles(warn_s=0.1) as slow:
        with slow.reading("/quick.wav"):
            pass
        with slow.reading("/a\x1b[31m.wav"):
            time.sleep(0.4)
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert r"'/a\x1b[31m.wav': has been read for 0 s and does not end" in said


def test_what_the_terminal_cannot_encode_is_written_out() -> None:
    code = "from nest_ssl.watchdog.system import open_missing_streams as fix; fix(); print('4 \\u2192 8 \\u2026')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "4 \\u2192 8 \\u2026\n"


def test_a_file_in_the_working_folder_is_not_taken_for_a_module_of_python(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not Python's json')\n")
    command = [*python_command("nest_ssl.watchdog.monitor"), str(tmp_path / "gone.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "gone.json" in done.stderr
    assert "not Python's json" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "getsid"), reason="sessions of POSIX")
@pytest.mark.parametrize("is_from_outside", [False, True])
def test_without_proc_a_living_process_is_not_taken_for_dead_nor_a_dead_one_for_alive(
    is_from_outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container where /proc is not mounted; a session that began outside it has the number 0 there."""
    monkeypatch.setattr(system, "HAS_PROC", False)
    getsid = os.getsid
    monkeypatch.setattr(os, "getsid", lambda pid: 0 * getsid(pid) if is_from_outside else getsid(pid))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mark = system.birthmark(process.pid)
        assert system.is_alive(process.pid)
        assert system.is_still(process.pid, mark)
        assert system.wait_until_gone({process.pid}, 0.05) == {process.pid}
        process.kill()
        process.wait()
    assert not system.is_alive(process.pid)
    assert not system.is_still(process.pid, mark)
    assert system.children_of({os.getpid()}) == set()
