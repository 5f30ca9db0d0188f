"""Monitors of several nodes: reports and orders arrive, silence is noticed, and strangers are refused."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from nest_ssl.launch.launcher import free_port
from nest_ssl.watchdog import exchange
from nest_ssl.watchdog.exchange import Follower, Leader, NodeReport, Orders, Seal, decode, encode, job_secret, listen
from nest_ssl.watchdog.judge.failure import Failure
from nest_ssl.watchdog.judge.flight import Collective
from nest_ssl.watchdog.rank import Stage
from nest_ssl.watchdog.rows import RankRow
from tests.unit.watchdog.facts import calls, row, worker

SECRET = b"of this job"


def report() -> NodeReport:
    return NodeReport(
        rows=[row(2, Stage.ENCODER, node=1, workers=[worker()]), row(3, node=1, usual_ms={"data": 2.0})],
        failures={3: Failure(3, "KeyError", "'a'", "Traceback …", 5, ["a batch"])},
        flights={2: calls(5, 9, done=1)},
        evidence_given=4,
        stop_signal=15,
    )


@pytest.fixture
def leader() -> Iterator[Leader]:
    leader = Leader("127.0.0.1", 0, SECRET, num_nodes=3, world_size=6)
    yield leader
    leader.close()


def follower_of(leader: Leader, secret: bytes = SECRET, node: int = 1) -> Follower:
    return Follower("127.0.0.1", leader.port, secret, node, 60.0)


def test_a_report_arrives_unchanged() -> None:
    arrived = decode(json.loads(json.dumps(encode(report()))))
    arrived.at = 0.0
    (failure,) = arrived.failures.values()
    assert failure.monotonic_ns == pytest.approx(5, abs=1e9)
    object.__setattr__(failure, "monotonic_ns", 5)
    assert arrived == report()


def test_failures_of_nodes_are_compared_by_age_and_not_by_clocks_since_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure of a node that was booted a day earlier has the higher number, and happened first."""
    day_ns = 86_400 * 10**9
    failed = NodeReport(failures={3: Failure(3, "KeyError", "'a'", "", day_ns + 100)})
    now_ns = time.monotonic_ns()
    with monkeypatch.context() as there:
        there.setattr(time, "monotonic_ns", lambda: day_ns + 100 + 2 * 10**9)
        message = encode(failed)
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    assert decode(message).failures[3].monotonic_ns == now_ns - 2 * 10**9


def test_the_leader_knows_all_rows_and_the_others_its_orders(leader: Leader) -> None:
    follower = follower_of(leader)
    assert leader.rows() == []
    orders = follower.send(report())
    assert orders is not None
    assert orders.stop_step == -1
    assert [known.rank for known in leader.rows()] == [2, 3]
    assert leader.failures()[3].message == "'a'"
    assert leader.flights(4).keys() == {2}
    assert leader.has_all_flights(4)
    assert leader.flights(5) == {}
    assert leader.stop_signal() == 15
    leader.orders.stop_step = 17
    again = follower.send(report())
    assert again is not None
    assert again.stop_step == 17


def test_flight_recorders_are_sent_once_and_only_their_last_and_open_calls() -> None:
    full = {n: Collective(n, "all_reduce", ((1024, 1024),), n <= 1999) for n in range(1, 2001)}
    full[3] = Collective(3, "broadcast", ((7,),), True)
    big = NodeReport(rows=report().rows, flights={rank: {"0": full} for rank in range(8)}, evidence_given=1)
    message = encode(big)
    assert len(json.dumps(message)) < 60_000  # 1.25 MB in the first edition
    kept = decode(json.loads(json.dumps(message))).flights[0]["0"]
    assert max(kept) == 2000
    assert not kept[2000].is_done
    assert kept[3].op == "broadcast"  # what was called before tells which call is new


def test_after_one_answer_messages_are_small_again(leader: Leader) -> None:
    follower, sent = follower_of(leader), report()
    assert follower.send(sent) is not None
    assert sent.flights == {}
    assert "flights" not in encode(sent)
    assert follower.send(sent) is not None
    assert leader.flights(4).keys() == {2}  # the leader keeps them


def test_silence_of_a_node_is_not_the_death_of_its_ranks_and_it_may_return(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nest_ssl.watchdog.rows.CONTACT_LOST_S", 0.6)
    follower = follower_of(leader)
    assert follower.send(report()) is not None
    assert not any(known.is_lost for known in leader.rows())
    time.sleep(0.7)
    assert all(known.is_lost and not known.is_gone for known in leader.rows())
    follower._drop()
    follower._next_attempt = 0.0
    assert follower.send(report()) is not None
    assert not any(known.is_lost for known in leader.rows())


def test_a_follower_returns_to_a_leader_that_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CONTACT_LOST_S", 0.1)
    monkeypatch.setattr(exchange, "RETRY_S", 0.0)
    port = free_port()
    first = Leader("127.0.0.1", port, SECRET, 3, 6)
    follower = Follower("127.0.0.1", port, SECRET, 1, 60.0)
    assert follower.send(report()) is not None
    first.close()
    time.sleep(0.2)
    assert follower.send(report()) is None
    assert follower.has_lost_leader
    second = Leader("127.0.0.1", port, SECRET, 3, 6)
    assert follower.send(report()) is not None
    assert not follower.has_lost_leader
    second.close()


def test_a_leader_that_has_not_started_yet_is_not_lost() -> None:
    follower = Follower("127.0.0.1", free_port(), SECRET, 1, 60.0)
    assert follower.send(report()) is None
    assert not follower.has_lost_leader


def test_a_leader_that_never_starts_is_lost() -> None:
    follower = Follower("127.0.0.1", free_port(), SECRET, 1, 0.0)
    assert follower.send(report()) is None
    assert follower.has_lost_leader


def test_another_program_on_the_port_is_not_taken_for_the_leader() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower = Follower("127.0.0.1", server.getsockname()[1], SECRET, 1, 60.0)
        answered = threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.0 400 Bad Request\n"))
        answered.start()
        assert follower.send(report()) is None
        answered.join()


# ---- attacks ----


def test_another_job_on_the_same_port_is_refused_and_learns_nothing(leader: Leader) -> None:
    leader.orders.stop_step = 3
    follower = follower_of(leader, secret=b"of another job")
    assert follower.send(report()) is None
    assert follower.was_refused
    assert follower.has_lost_leader  # at once: it need not wait for watchdog.init_s
    assert leader.rows() == []


def connect(leader: Leader) -> tuple[socket.socket, str]:
    sock = socket.create_connection(("127.0.0.1", leader.port), 5.0)
    return sock, sock.makefile().readline().strip()


def test_a_forged_report_is_refused(leader: Leader) -> None:
    forged = {"node": 1, **encode(NodeReport(rows=[row(2, node=1, process="")]))}
    for line in (json.dumps(forged).encode() + b"\n", b"0" * 64 + b" " + json.dumps(forged).encode() + b"\n"):
        sock, _ = connect(leader)
        sock.sendall(b"0" * 32 + b"\n" + line)
        assert sock.makefile("rb").read() == exchange.REFUSED
    assert leader.rows() == []


def test_a_recorded_report_cannot_be_repeated(leader: Leader) -> None:
    sock, number = connect(leader)
    line = Seal(SECRET, number, "0" * 32, leads=False).line({"node": 1, **encode(report())})
    sock.sendall(b"0" * 32 + b"\n" + line + line)  # twice on one connection
    assert exchange.REFUSED in sock.makefile("rb").read()
    leader._nodes.clear()
    sock, _ = connect(leader)
    sock.sendall(b"0" * 32 + b"\n" + line)  # and on another one
    assert sock.makefile("rb").read() == exchange.REFUSED
    assert leader.rows() == []


@pytest.mark.parametrize("wrong", [row(2, node=2), row(99, node=1), row(-1, node=1)])
def test_a_node_reports_its_own_ranks_alone(leader: Leader, wrong: RankRow) -> None:
    assert follower_of(leader).send(NodeReport(rows=[wrong])) is None
    assert follower_of(leader, node=0).send(NodeReport()) is None
    assert follower_of(leader, node=3).send(NodeReport()) is None
    assert leader.rows() == []


def test_a_line_without_end_is_cut_off(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_LINE_BYTES", 100_000)
    sock, _ = connect(leader)
    with pytest.raises(OSError, match="reset|roken pipe|abort"):
        sock.sendall(b"x" * 50_000_000)
    assert not leader._connections


def test_a_connection_that_says_nothing_is_closed(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "TIMEOUT_S", 0.2)
    sock, _ = connect(leader)
    assert sock.recv(1) == b""
    assert not leader._connections


def test_a_false_leader_is_not_obeyed() -> None:
    """It ended the job with exit code 0 in the first edition."""
    orders = asdict(Orders(end={"exit_code": 0, "incident": "../../x", "fault": None}))

    def lie(server: socket.socket) -> None:
        sock, _ = server.accept()
        sock.sendall(b"0" * 32 + b"\n")
        sock.recv(10_000)
        sock.sendall(b"0" * 64 + b" " + json.dumps(orders).encode() + b"\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lie, args=(server,), daemon=True).start()
        assert Follower("127.0.0.1", server.getsockname()[1], SECRET, 1, 60.0).send(report()) is None


@pytest.mark.parametrize(
    "end",
    [
        {"exit_code": 75, "incident": "../../x", "fault": None},
        {"exit_code": 75, "incident": "/etc/x", "fault": None},
        {"exit_code": 75, "incident": "..", "fault": None},
        {"exit_code": 7, "incident": None, "fault": None},
    ],
)
def test_orders_that_leave_the_run_folder_are_refused(end: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="exit code|name"):
        Orders.checked(asdict(Orders(end=end)))


def test_the_secret_comes_from_the_environment_or_from_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    secret = job_secret("a", home)
    path = exchange.key_path(home)
    assert path.stat().st_mode & 0o777 == 0o600
    assert job_secret("a", home) == secret
    assert job_secret("b", home) != secret
    assert job_secret("a", home | {"NEST_SSL_SECRET": "x"}) == job_secret("a", {"NEST_SSL_SECRET": "x"})
    path.chmod(0o644)
    with pytest.raises(ValueError, match="mode 600"):
        job_secret("a", home)
    os.truncate(path, 3)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="too short"):
        job_secret("a", home)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="Set NEST_SSL_SECRET"):
        job_secret("a", {"HOME": str(tmp_path / "file")})


def test_the_leader_listens_on_the_interface_of_its_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **other: found)
    with listen("node7", 0) as sock:  # Debian's /etc/hosts: the others resolve the name to another address
        assert sock.getsockname()[0] == "0.0.0.0"
    found[0] = (*found[0][:4], ("192.0.2.1", 0))
    with listen("service", 0) as sock:  # nobody's address here
        assert sock.getsockname()[0] == "0.0.0.0"


def test_a_taken_port_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])
