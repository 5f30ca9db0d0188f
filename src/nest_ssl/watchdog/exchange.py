"""The exchange between monitors of several nodes: node 0 leads, the others report their rows and obey its orders.

It uses lines of JSON over plain sockets rather than torch's TCPStore: the monitor stays free of torch. One thread of
the leader serves all nodes. Every line carries an HMAC with the job's secret over both ends' random numbers and a
count: a forged, repeated or reordered line is refused, and so is a false leader. Lines have a maximum length.

Silence means that nothing is known, not that a node is dead: the network may be down for a while. A follower keeps
trying to return.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import selectors
import socket
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nest_ssl.watchdog.judge.failure import Failure
from nest_ssl.watchdog.judge.flight import Collective, Flight, trimmed
from nest_ssl.watchdog.rank import FINISHED, NEEDS_A_PERSON, RESUMABLE
from nest_ssl.watchdog.rows import CONTACT_LOST_S, RankRow

TIMEOUT_S = 4.0
RETRY_S = 1.0
"""How long a follower waits between two attempts to reach a leader that does not respond."""
REPORT_EVERY_S = 0.25
NODES_PER_S = 256
"""Reports per second that the leader is to receive in all: 64 nodes report 4 times a second, 512 every 2 s."""
URGENT_S = 3.0
"""After something has happened on a node, it reports more often for this long: up to `URGENT_PER_S` in all."""
URGENT_PER_S = 512
"""A report costs the leader about 0.5 ms; when ranks wait for one that stalls, all nodes are urgent at once."""
MAX_LINE_BYTES = 1 << 20
"""A report of 8 ranks with flight recorders has about 50 kB; 8 tracebacks add 8 x MAX_TEXT at most."""
MAX_TEXT = 20_000
MAX_STRANGERS = 64
"""Connections that have not authenticated yet; each of them has `TIMEOUT_S` to do so."""
SECRET_VARIABLE = "NEST_SSL_SECRET"
REFUSED = b"refused\n"


# ---- the secret ----


def key_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the file with the user's key: a home folder is usually the same on all nodes of a cluster."""
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or os.path.expanduser("~")) / ".config")
    return Path(base) / "nest-ssl" / "monitor.key"


def job_secret(job: str, env: Mapping[str, str] = os.environ) -> bytes:
    """Return what only monitors of this job know, from NEST_SSL_SECRET or from the user's key file.

    It is in no command line and in no file of the run. ValueError: neither is usable.
    """
    key = env.get(SECRET_VARIABLE, "").encode() or _user_key(key_path(env))
    return hmac.new(key, job.encode(), hashlib.sha256).digest()


def _user_key(path: Path) -> bytes:
    """Return the content of the key file; the first process that needs one makes it."""
    way_out = f"Set {SECRET_VARIABLE} to the same random text on all nodes."
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # complete or not at all, and the first one stays
            temporary.unlink()
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077):
                raise ValueError(f"{path}: must belong to you and have mode 600. Remove it, or: {way_out}")
            key = file.read(1024)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}. {way_out}") from error
    if len(key) < 32:
        raise ValueError(f"{path}: too short for a key. Remove it, or: {way_out}")
    return key


class Seal:
    """Signs and checks the lines of one connection, each direction with its own count."""

    def __init__(self, secret: bytes, leaders: str, followers: str, *, leads: bool) -> None:
        self._secret, self._numbers, self._leads = secret, f"{leaders} {followers}", leads
        self._sent = self._received = 0

    def line(self, content: dict[str, Any]) -> bytes:
        text = json.dumps(content, separators=(",", ":")).encode()
        self._sent += 1
        return self._mac(text, self._sent, by_leader=self._leads) + b" " + text + b"\n"

    def content(self, line: bytes) -> dict[str, Any]:
        """Return what a line says; ValueError if the other end did not write it, now and here."""
        mac, _, text = line.rstrip(b"\n").partition(b" ")
        self._received += 1
        if not hmac.compare_digest(mac, self._mac(text, self._received, by_leader=not self._leads)):
            raise ValueError("a line without the job's signature")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content

    def _mac(self, text: bytes, number: int, *, by_leader: bool) -> bytes:
        head = f"{'leader' if by_leader else 'follower'} {self._numbers} {number} ".encode()
        return hmac.new(self._secret, head + text, hashlib.sha256).hexdigest().encode()


# ---- messages ----


@dataclass
class Orders:
    """What the leader wants every node to do."""

    stop_step: int = -1
    stop_agreed: int = -1
    evidence_request: int = 0
    end: dict[str, Any] | None = None
    """The verdict: exit code, incident, fault."""

    @classmethod
    def checked(cls, content: dict[str, Any]) -> Orders:
        """Return the orders, if they are such as a leader gives: an incident's name cannot leave its folder."""
        orders = cls(**content)
        end = orders.end
        if not all(type(n) is int for n in (orders.stop_step, orders.stop_agreed, orders.evidence_request)):
            raise ValueError("orders without numbers")
        if end is not None:
            name = end["incident"]
            if end["exit_code"] not in (FINISHED, NEEDS_A_PERSON, RESUMABLE):
                raise ValueError("an unknown exit code")
            if name is not None and re.fullmatch(r"\w[\w.-]{0,199}", name) is None:
                raise ValueError("a name that is not an incident's")
        return orders


@dataclass
class NodeReport:
    """What a node reports at every look."""

    rows: list[RankRow] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    """Sent once, in answer to a request."""
    evidence_given: int = 0
    stop_signal: int = 0
    stop_acknowledged: int = -1
    at: float = 0.0


def encode(report: NodeReport) -> dict[str, Any]:
    """Return the report as JSON. Clocks of nodes differ: it holds ages, and times of failures become ages."""
    now_ns = time.monotonic_ns()
    content: dict[str, Any] = {
        "rows": [_thin(row).to_json() for row in report.rows],
        "evidence_given": report.evidence_given,
        "stop_signal": report.stop_signal,
        "stop_acknowledged": report.stop_acknowledged,
    }
    if report.failures:
        content["failures"] = [
            asdict(failure)
            | {
                "monotonic_ns": failure.monotonic_ns - now_ns,
                "message": failure.message[:MAX_TEXT],
                "traceback": failure.traceback[-MAX_TEXT:],
            }
            for failure in report.failures.values()
        ]
    if report.flights:
        content["flights"] = {
            rank: {group: [asdict(call) for call in calls.values()] for group, calls in trimmed(flight).items()}
            for rank, flight in report.flights.items()
        }
    return content


def _thin(row: RankRow) -> RankRow:
    """Leave out workers of whom nothing can be said: most of a report would be paths that are read in a moment."""
    workers = [w for w in row.workers if (w.is_reading and w.since_s > 1.0) or w.process in ("", "Z", "T", "t")]
    return row if len(workers) == len(row.workers) else dataclasses.replace(row, workers=workers)


def decode(message: dict[str, Any]) -> NodeReport:
    """Return the report, with the times of failures on this node's clock."""
    now_ns = time.monotonic_ns()

    def collective(call: dict[str, Any]) -> Collective:
        return Collective(**call | {"sizes": tuple(tuple(size) for size in call["sizes"])})

    flights: dict[int, Flight] = {
        int(rank): {group: {c["number"]: collective(c) for c in calls} for group, calls in flight.items()}
        for rank, flight in message.get("flights", {}).items()
    }
    failures = [Failure(**f | {"monotonic_ns": now_ns + f["monotonic_ns"]}) for f in message.get("failures", ())]
    return NodeReport(
        rows=[RankRow.from_json(row) for row in message["rows"]],
        failures={failure.rank: failure for failure in failures},
        flights=flights,
        evidence_given=int(message["evidence_given"]),
        stop_signal=int(message["stop_signal"]),
        stop_acknowledged=int(message["stop_acknowledged"]),
        at=time.monotonic(),
    )


# ---- the leader ----


class _Connection:
    """The leader's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.since = time.monotonic()
        self.number = secrets.token_hex(16)
        self.seal: Seal | None = None
        self.node: int | None = None
        """None: it has not authenticated yet."""
        self.unread = bytearray()
        self.unsent = bytearray(self.number.encode() + b"\n")


class Leader:
    """Node 0's end. One thread keeps the last report of every node and answers with the orders."""

    def __init__(self, address: str, port: int, secret: bytes, num_nodes: int, world_size: int) -> None:
        self.orders = Orders()
        self._secret, self._num_nodes, self._world_size = secret, num_nodes, world_size
        self._nodes: dict[int, NodeReport] = {}
        self._flights: dict[int, tuple[int, dict[int, Flight]]] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._listener = listen(address, port)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="nest-ssl leader", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _serve(self) -> None:
        while self._is_open:
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._attend(key.data)
            now = time.monotonic()
            for connection in [c for c in self._connections if c.node is None and now - c.since > TIMEOUT_S]:
                self._drop(connection)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it was closed again, or there are no file descriptors left
            return
        if sum(c.node is None for c in self._connections) >= MAX_STRANGERS + self._num_nodes:
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._write(connection)

    def _attend(self, connection: _Connection) -> None:
        """Read what has arrived, answer complete lines, and drop a connection that says anything else."""
        try:
            chunk = connection.socket.recv(1 << 18)
            if not chunk:
                self._drop(connection)
                return
            connection.unread += chunk
            while (end := connection.unread.find(b"\n")) >= 0:
                line = bytes(connection.unread[: end + 1])
                del connection.unread[: end + 1]
                self._hear(connection, line)
            if len(connection.unread) > MAX_LINE_BYTES:
                raise ValueError("a line without end")
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            connection.unsent += REFUSED
            self._write(connection)
            self._drop(connection)
            return
        self._write(connection)

    def _hear(self, connection: _Connection, line: bytes) -> None:
        if connection.seal is None:
            followers = line.strip().decode("ascii")
            if re.fullmatch(r"[0-9a-f]{32}", followers) is None:
                raise ValueError("not a monitor")
            connection.seal = Seal(self._secret, connection.number, followers, leads=True)
            return
        message = connection.seal.content(line)
        node = message["node"]
        if type(node) is not int or not 0 < node < self._num_nodes:
            raise ValueError("no such node")
        report = decode(message)
        if any(row.node != node or not 0 <= row.rank < self._world_size for row in report.rows):
            raise ValueError("no such rank")
        connection.node = node
        with self._lock:
            self._nodes[node] = report
            if report.flights:
                self._flights[node] = (report.evidence_given, report.flights)
        connection.unsent += connection.seal.line(asdict(self.orders))

    def _write(self, connection: _Connection) -> None:
        """Send what the other end takes now, and the rest with the next answer; orders are short."""
        try:
            if connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _reports(self) -> list[NodeReport]:
        with self._lock:
            return list(self._nodes.values())

    def rows(self) -> list[RankRow]:
        """Return the rows of all other nodes as they were last reported, with how long ago if that is long."""
        rows, now = [], time.monotonic()
        slow_s = 2 * report_every_s(self._num_nodes)
        for report in self._reports():
            silent_s = now - report.at
            if silent_s <= slow_s:
                rows += report.rows
            else:
                rows += [dataclasses.replace(row, silent_s=silent_s) for row in report.rows]
        return rows

    def failures(self) -> dict[int, Failure]:
        return {rank: failure for report in self._reports() for rank, failure in report.failures.items()}

    def flights(self, request: int) -> dict[int, Flight]:
        """Return the flight recorders that nodes have sent for this request."""
        with self._lock:
            given = [flights for number, flights in self._flights.values() if number >= request]
        return {rank: flight for flights in given for rank, flight in flights.items()}

    def has_all_flights(self, request: int) -> bool:
        """Return whether every node that is heard of has answered this request."""
        now = time.monotonic()
        with self._lock:
            heard = [report for report in self._nodes.values() if now - report.at <= CONTACT_LOST_S]
        return all(report.evidence_given >= request for report in heard)

    def stop_signal(self) -> int:
        return max((report.stop_signal for report in self._reports()), default=0)

    def nodes_without(self, stop_step: int) -> list[int]:
        """Return the other nodes that have not acknowledged this step."""
        with self._lock:
            acknowledged = {node for node, report in self._nodes.items() if report.stop_acknowledged == stop_step}
        return sorted(set(range(1, self._num_nodes)) - acknowledged)

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()


def listen(address: str, port: int) -> socket.socket:
    """Listen on the interface that MASTER_ADDR names.

    Two kinds of address cannot be bound to: one that is translated on the way (a service's), and a host's own name
    where /etc/hosts says 127.0.1.1, as Debian's does. Then it listens on all interfaces; every line is signed anyway.
    """
    family, where = socket.AF_INET, ""
    with contextlib.suppress(OSError, ValueError):
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        is_meant = address == "localhost" or address == found[0]
        where = str(found[0]) if is_meant or not ipaddress.ip_address(str(found[0])).is_loopback else ""
    try:
        return socket.create_server((where, port), family=family, backlog=1024)
    except OSError:
        if not where or _is_taken(where, port, family):
            raise
        return socket.create_server(("", port), backlog=1024)


def _is_taken(where: str, port: int, family: int) -> bool:
    """Return whether the address is one of this machine's, so that it must be the port that cannot be had."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((where, 0))
        except OSError:
            return False
    return True


# ---- the others ----


def report_every_s(num_nodes: int, *, urgent: bool = False) -> float:
    return max(REPORT_EVERY_S, num_nodes / (URGENT_PER_S if urgent else NODES_PER_S))


class Follower:
    """The end of any other node."""

    def __init__(self, address: str, port: int, secret: bytes, node: int, patience_s: float) -> None:
        self.address, self.port, self.node = address, port, node
        self.was_refused = False
        """The leader does not know this job's secret, or this node."""
        self._secret = secret
        self._first_answer_until = time.monotonic() + patience_s
        self._socket: socket.socket | None = None
        self._seal: Seal | None = None
        self._answers: Any = None
        self._answered_at: float | None = None
        self._next_attempt = 0.0

    @property
    def has_lost_leader(self) -> bool:
        """Whether the leader stopped answering, or never started to."""
        until = self._first_answer_until if self._answered_at is None else self._answered_at + CONTACT_LOST_S
        return self.was_refused or time.monotonic() > until

    @property
    def was_answered(self) -> bool:
        return self._answered_at is not None

    def send(self, report: NodeReport) -> Orders | None:
        """Report to the leader; return its orders, or None if it cannot be reached now.

        Flight recorders are sent once: every message after the first request carried them in the first edition, and
        31 nodes drowned their leader.
        """
        if self._socket is None and time.monotonic() < self._next_attempt:
            return None
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            assert self._seal is not None
            self._socket.sendall(self._seal.line({"node": self.node, **encode(report)}))
            orders = Orders.checked(self._seal.content(self._line()))
        except (OSError, ValueError, TypeError, KeyError):  # nobody is there, or it is not this job's leader
            self._drop()
            return None
        report.flights = {}
        self.was_refused = False
        self._answered_at = time.monotonic()
        return orders

    def _connect(self) -> None:
        self._socket = socket.create_connection((self.address, self.port), TIMEOUT_S)
        self._answers = self._socket.makefile("rb")
        leaders = self._line().strip().decode("ascii", errors="replace")[:64]
        followers = secrets.token_hex(16)
        self._seal = Seal(self._secret, leaders, followers, leads=False)
        self._socket.sendall(followers.encode() + b"\n")

    def _line(self) -> bytes:
        line: bytes = self._answers.readline(MAX_LINE_BYTES)
        self.was_refused = line == REFUSED
        return line

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._answers.close()
                self._socket.close()
        self._socket = self._answers = None
        self._next_attempt = time.monotonic() + RETRY_S
