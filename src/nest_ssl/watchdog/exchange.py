"""The exchange between monitors of several nodes: node 0 leads, the others report their rows and obey its orders.

It uses lines of JSON over plain sockets rather than torch's TCPStore: the monitor stays free of torch, and a leader
that is gone shows as a closed connection. There is one message per look, a few kilobytes per node.
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

from nest_ssl.watchdog.judge.failure import Failure
from nest_ssl.watchdog.judge.flight import Collective, Flight
from nest_ssl.watchdog.rows import RankRow

TIMEOUT_S = 2.0
CONTACT_LOST_S = 5.0
"""Contact with a node that has been silent for longer than this is lost."""


@dataclass
class Orders:
    """What the leader wants every node to do."""

    stop_step: int = -1
    evidence_request: int = 0
    end: dict[str, Any] | None = None
    """The verdict: exit code, incident, fault."""


@dataclass
class NodeReport:
    """What a node reports at every look."""

    rows: list[RankRow] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    evidence_given: int = 0
    stop_signal: int = 0
    at: float = 0.0


def encode(report: NodeReport) -> dict[str, Any]:
    return {
        "rows": [row.to_json() for row in report.rows],
        "failures": [asdict(failure) for failure in report.failures.values()],
        "flights": {
            rank: {group: [asdict(call) for call in calls.values()] for group, calls in flight.items()}
            for rank, flight in report.flights.items()
        },
        "evidence_given": report.evidence_given,
        "stop_signal": report.stop_signal,
    }


def decode(message: dict[str, Any]) -> NodeReport:
    def collective(call: dict[str, Any]) -> Collective:
        return Collective(**call | {"sizes": tuple(tuple(size) for size in call["sizes"])})

    flights: dict[int, Flight] = {
        int(rank): {group: {c["number"]: collective(c) for c in calls} for group, calls in flight.items()}
        for rank, flight in message["flights"].items()
    }
    failures = [Failure(**failure) for failure in message["failures"]]
    return NodeReport(
        rows=[RankRow.from_json(row) for row in message["rows"]],
        failures={failure.rank: failure for failure in failures},
        flights=flights,
        evidence_given=message["evidence_given"],
        stop_signal=message["stop_signal"],
        at=time.monotonic(),
    )


class Leader:
    """Node 0's end. One thread per node keeps its last report and answers with the orders."""

    def __init__(self, port: int, job: str) -> None:
        self.orders = Orders()
        self.job = job
        self._nodes: dict[int, NodeReport] = {}
        self._lock = threading.Lock()
        leader = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    answer = leader._receive(json.loads(line))
                    self.wfile.write((json.dumps(answer) + "\n").encode())

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server(("", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _receive(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["job"] == self.job:
            with self._lock:
                self._nodes[message["node"]] = decode(message)
            return asdict(self.orders)
        return asdict(Orders())  # a node of another job that uses the same port

    def _reports(self) -> list[NodeReport]:
        with self._lock:
            return list(self._nodes.values())

    def rows(self) -> list[RankRow]:
        """Return the rows of all other nodes; the ranks of a node without contact count as gone."""
        rows = []
        for report in self._reports():
            lost = time.monotonic() - report.at > CONTACT_LOST_S
            rows += [dataclasses.replace(row, process="", is_lost=True) if lost else row for row in report.rows]
        return rows

    def failures(self) -> dict[int, Failure]:
        return {rank: failure for report in self._reports() for rank, failure in report.failures.items()}

    def flights(self, request: int) -> dict[int, Flight]:
        """Return the flight recorders that nodes have sent for this request."""
        given = [report for report in self._reports() if report.evidence_given >= request]
        return {rank: flight for report in given for rank, flight in report.flights.items()}

    def stop_signal(self) -> int:
        return max((report.stop_signal for report in self._reports()), default=0)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Follower:
    """The end of any other node."""

    def __init__(self, address: str, port: int, job: str, node: int, patience_s: float) -> None:
        self.address, self.port, self.job, self.node = address, port, job, node
        self._first_answer_until = time.monotonic() + patience_s
        self._socket: socket.socket | None = None
        self._answers: Any = None
        self._answered_at: float | None = None

    @property
    def has_lost_leader(self) -> bool:
        """Whether the leader stopped answering, or never started to."""
        until = self._first_answer_until if self._answered_at is None else self._answered_at + CONTACT_LOST_S
        return time.monotonic() > until

    def send(self, report: NodeReport) -> Orders | None:
        """Report to the leader; return its orders, or None if it cannot be reached now."""
        try:
            if self._socket is None:
                self._socket = socket.create_connection((self.address, self.port), TIMEOUT_S)
                self._answers = self._socket.makefile("r")
            message = {"job": self.job, "node": self.node, **encode(report)}
            self._socket.sendall((json.dumps(message) + "\n").encode())
            orders = Orders(**json.loads(self._answers.readline()))
        except (OSError, ValueError, TypeError):  # nobody is there, or another program has this port
            self._drop()
            return None
        self._answered_at = time.monotonic()
        return orders

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None
