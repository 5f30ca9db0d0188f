"""Monitors of several nodes: reports and orders arrive, and a lost node is noticed."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from nest_ssl.launch.launcher import free_port
from nest_ssl.watchdog import exchange
from nest_ssl.watchdog.exchange import Follower, Leader, NodeReport, decode, encode
from nest_ssl.watchdog.judge.failure import Failure
from nest_ssl.watchdog.rank import Stage
from tests.unit.watchdog.facts import calls, row, worker


def report() -> NodeReport:
    return NodeReport(
        rows=[row(2, Stage.ENCODER, node=1, workers=[worker()]), row(3, node=1, usual_ms={"data": 2.0})],
        failures={3: Failure(3, "KeyError", "'a'", "Traceback …", 5, ["a batch"])},
        flights={2: calls(5, 9, done=1)},
        evidence_given=4,
        stop_signal=15,
    )


def test_a_report_arrives_unchanged() -> None:
    arrived = decode(json.loads(json.dumps(encode(report()))))
    arrived.at = 0.0
    assert arrived == report()


def test_the_leader_knows_all_rows_and_the_others_its_orders() -> None:
    port = free_port()
    leader = Leader(port, "job")
    try:
        follower = Follower("127.0.0.1", port, "job", 1, 60.0)
        assert leader.rows() == []
        orders = follower.send(report())
        assert orders is not None
        assert orders.stop_step == -1
        assert [known.rank for known in leader.rows()] == [2, 3]
        assert leader.failures()[3].message == "'a'"
        assert leader.flights(4).keys() == {2}
        assert leader.flights(5) == {}
        assert leader.stop_signal() == 15
        leader.orders.stop_step = 17
        again = follower.send(report())
        assert again is not None
        assert again.stop_step == 17
    finally:
        leader.close()


def test_another_job_on_the_same_port_is_ignored() -> None:
    port = free_port()
    leader = Leader(port, "job")
    leader.orders.stop_step = 3
    try:
        orders = Follower("127.0.0.1", port, "other job", 1, 60.0).send(report())
        assert orders is not None
        assert orders.stop_step == -1
        assert leader.rows() == []
    finally:
        leader.close()


def test_a_silent_node_is_lost_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CONTACT_LOST_S", 0.2)
    port = free_port()
    leader = Leader(port, "job")
    follower = Follower("127.0.0.1", port, "job", 1, 60.0)
    assert follower.send(report()) is not None
    assert not any(known.is_lost for known in leader.rows())
    time.sleep(0.3)
    assert all(known.is_lost and known.is_gone for known in leader.rows())
    leader.close()
    follower._drop()
    assert follower.send(report()) is None
    assert follower.has_lost_leader


def test_a_leader_that_has_not_started_yet_is_not_lost() -> None:
    follower = Follower("127.0.0.1", free_port(), "job", 1, 60.0)
    assert follower.send(report()) is None
    assert not follower.has_lost_leader


def test_a_leader_that_never_starts_is_lost() -> None:
    follower = Follower("127.0.0.1", free_port(), "job", 1, 0.0)
    assert follower.send(report()) is None
    assert follower.has_lost_leader


def test_another_program_on_the_port_is_not_taken_for_the_leader() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower = Follower("127.0.0.1", server.getsockname()[1], "job", 1, 60.0)
        answered = threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.0 400 Bad Request\n"))
        answered.start()
        assert follower.send(report()) is None
        answered.join()
