"""Monitors of several nodes: node 0 leads, the others tell it their rows and do what it says.

Lines of JSON over plain sockets rather than torch's TCPStore: the monitor stays free of torch, and a leader that is
gone is seen as a closed connection. One message per look, a few kilobytes per node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import socketserver
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from nest_ssl.watchdog.judge.flight import Collective, Flight
from nest_ssl.watchdog.report.failure import Failure
from nest_ssl.watchdog.rows import RankRow

TIMEOUT_S = 2.0
HEARD_WITHIN_S = 5.0
"""A node that has said nothing for longer is lost."""


@dataclass
class Orders:
    """What the leader wants of every node."""

    stop_step: int = -1
    evidence_request: int = 0
    end: dict[str, Any] | None = None
    """The verdict: exit code, incident, fault."""


@dataclass
class Told:
    """What a node has told last."""

    rows: list[RankRow] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    evidence_given: int = 0
    stop_signal: int = 0
    at: float = 0.0


def encode(told: Told) -> dict[str, Any]:
    return {
        "rows": [row.to_json() for row in told.rows],
        "failures": [asdict(failure) for failure in told.failures.values()],
        "flights": {
            rank: {group: [asdict(call) for call in calls.values()] for group, calls in flight.items()}
            for rank, flight in told.flights.items()
        },
        "evidence_given": told.evidence_given,
        "stop_signal": told.stop_signal,
    }


def decode(message: dict[str, Any]) -> Told:
    def collective(call: dict[str, Any]) -> Collective:
        return Collective(**call | {"sizes": tuple(tuple(size) for size in call["sizes"])})

    flights: dict[int, Flight] = {
        int(rank): {group: {c["number"]: collective(c) for c in calls} for group, calls in flight.items()}
        for rank, flight in message["flights"].items()
    }
    failures = [Failure(**failure) for failure in message["failures"]]
    return Told(
        rows=[RankRow.from_json(row) for row in message["rows"]],
        failures={failure.rank: failure for failure in failures},
        flights=flights,
        evidence_given=message["evidence_given"],
        stop_signal=message["stop_signal"],
        at=time.monotonic(),
    )


class Leader:
    """Node 0's end. Each node has a thread that keeps what it told last and answers with the orders."""

    def __init__(self, port: int, job: str) -> None:
        self.orders = Orders()
        self.job = job
        self._nodes: dict[int, Told] = {}
        self._lock = threading.Lock()
        leader = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    answer = leader._hear(json.loads(line))
                    self.wfile.write((json.dumps(answer) + "\n").encode())

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server(("", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _hear(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["job"] == self.job:
            with self._lock:
                self._nodes[message["node"]] = decode(message)
            return asdict(self.orders)
        return asdict(Orders())  # of another job that uses the same port

    def _told(self) -> dict[int, Told]:
        with self._lock:
            return dict(self._nodes)

    def rows(self) -> list[RankRow]:
        """Of all other nodes; ranks of a node that is not heard of any more count as gone."""
        rows = []
        for told in self._told().values():
            lost = time.monotonic() - told.at > HEARD_WITHIN_S
            rows += [dataclasses.replace(row, process="", is_lost=True) if lost else row for row in told.rows]
        return rows

    def failures(self) -> dict[int, Failure]:
        return {rank: failure for told in self._told().values() for rank, failure in told.failures.items()}

    def flights(self, request: int) -> dict[int, Flight]:
        """What was given for this request."""
        given = [told for told in self._told().values() if told.evidence_given >= request]
        return {rank: flight for told in given for rank, flight in told.flights.items()}

    def stop_signal(self) -> int:
        return max((told.stop_signal for told in self._told().values()), default=0)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Follower:
    """Another node's end."""

    def __init__(self, address: str, port: int, job: str, node: int, patience_s: float) -> None:
        self.address, self.port, self.job, self.node = address, port, job, node
        self._first_word_until = time.monotonic() + patience_s
        self._socket: socket.socket | None = None
        self._answers: Any = None
        self._heard_at: float | None = None

    @property
    def has_lost_leader(self) -> bool:
        """It was there, and is not any more; or it never came."""
        until = self._first_word_until if self._heard_at is None else self._heard_at + HEARD_WITHIN_S
        return time.monotonic() > until

    def tell(self, told: Told) -> Orders | None:
        """Tell the leader; its orders, or None if it cannot be reached now."""
        try:
            if self._socket is None:
                self._socket = socket.create_connection((self.address, self.port), TIMEOUT_S)
                self._answers = self._socket.makefile("r")
            message = {"job": self.job, "node": self.node, **encode(told)}
            self._socket.sendall((json.dumps(message) + "\n").encode())
            orders = Orders(**json.loads(self._answers.readline()))
        except (OSError, ValueError, TypeError):  # nobody there, or somebody else has this port
            self._drop()
            return None
        self._heard_at = time.monotonic()
        return orders

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None
