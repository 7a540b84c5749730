"""Carries out the decisions of an elastic job's driver: starts and ends processes, answers workers."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from dad.runner import network, remote
from dad.runner.elastic import notify, round_name, warm
from dad.runner.elastic.discovery import DiscoveryError, NotRunnableError, Script, Watcher
from dad.runner.elastic.driver import Driver, Failure, Settings, Verdict
from dad.runner.elastic.endpoints import REMOVED, Endpoints, format_place
from dad.runner.elastic.notify import WorkerAddress
from dad.runner.elastic.placement import Seat
from dad.runner.errors import LaunchError
from dad.runner.hosts import Host, Slot
from dad.runner.launch import (
    LaunchPlan,
    Network,
    base_environment,
    listening_address,
    plan_network,
    start_rank,
    start_server,
    worker_variables,
    working_directory,
)
from dad.runner.output import Nowhere, RankStream
from dad.runner.processes import KILL, ProcessPool, RankProcess
from dad.runner.rendezvous import RendezvousServer
from dad.runner.secret import notification_key
from dad.runner.tracebacks import TracebackFolder
from dad.runner.verdict import advice, how_it_ended, last_lines, lost_peer
from dad.world import new_job_id

# A worker on another host ends when it has not heard of us for this long. That is before ssh gives up the
# connection here (30 s), so that its seat is not taken while it still runs.
SILENCE_SECONDS = 25.0
SIGN_OF_LIFE_SECONDS = 5.0
_NOTIFY_SECONDS = 5.0
# The most workers to name, with their reasons, when the job ends.
_MOST_NAMED = 16


@dataclass(frozen=True)
class ElasticPlan:
    """What an elastic launch needs besides a LaunchPlan, whose hosts are used if there is no script."""

    settings: Settings
    script: Script | None = None


@dataclass(frozen=True)
class Outcome:
    """code: the exit code of dadrun. num_ranks: of the last round."""

    code: int
    num_ranks: int


def launch_elastic(plan: LaunchPlan, elastic: ElasticPlan) -> Outcome:
    """Runs the job to its end. Raises LaunchError if it cannot begin."""
    working_directory()
    hosts, net = plan_elastic_network(plan.hosts, elastic, plan.interfaces)
    with start_server(net, {**plan.environment, **plan.variables}) as server:
        return run_elastic(replace(plan, hosts=hosts), elastic, net, server)


def run_elastic(plan: LaunchPlan, elastic: ElasticPlan, net: Network, server: RendezvousServer) -> Outcome:
    """Like launch_elastic(), with known hosts to begin with, and a server that is not stopped."""
    return _Launch(plan, elastic, net, server).run()


def plan_elastic_network(
    hosts: list[Host], elastic: ElasticPlan, interfaces: str | None
) -> tuple[list[Host], Network]:
    """The hosts to begin with, for which a script may have to be waited for, and the network on which they
    reach us."""
    if elastic.script is None:
        _check_slots(hosts, elastic.settings)
    else:
        hosts = _first_hosts(elastic.script, elastic.settings)
    net = plan_network([host.name for host in hosts], interfaces)
    if elastic.script is not None and interfaces is not None:
        # Hosts that come later must be able to reach us, too.
        net = replace(net, address=listening_address(interfaces))
    return hosts, net


def _check_slots(hosts: list[Host], settings: Settings) -> None:
    slots, wanted = sum(host.slots for host in hosts), max(settings.min_np, settings.np or 0)
    if slots < wanted:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"the hosts have {slots} slots ({listed}) where {wanted} are needed (-np, --min-np); raise the "
            "slots, add a host, or give --host-discovery-script, whose hosts may come later"
        )


def _first_hosts(script: Script, settings: Settings) -> list[Host]:
    """Waits until there are enough slots to begin with. Raises LaunchError."""
    wanted = max(settings.min_np, settings.np or 0)
    deadline = time.monotonic() + settings.elastic_timeout
    said = ""
    while True:
        hosts: list[Host] = []
        try:
            hosts = script.find()
            now = f"names {sum(host.slots for host in hosts)} of {wanted} slots"
        except NotRunnableError as error:
            raise LaunchError(f"--host-discovery-script {script.path} {error}") from error
        except DiscoveryError as error:
            now = str(error)
        slots = sum(host.slots for host in hosts)
        late = time.monotonic() > deadline
        if slots >= wanted or (late and slots >= settings.min_np):
            return hosts
        if late:
            raise LaunchError(
                f"{script.path} {now}, also after {settings.elastic_timeout:g} s (--elastic-timeout)"
            )
        if now != said:
            said = now
            print(f"dadrun: {script.path} {now}; waiting for more", file=sys.stderr, flush=True)
        time.sleep(1.0)


class _Launch:
    """The driver's Actions, and the loop that delivers events to it."""

    def __init__(
        self, plan: LaunchPlan, elastic: ElasticPlan, net: Network, server: RendezvousServer
    ) -> None:
        self._plan = plan
        self._script = elastic.script
        self._net = net
        self._server = server
        self._pool = ProcessPool(tracebacks=TracebackFolder())
        self._driver = Driver(elastic.settings, self)
        self._base = base_environment(plan, net)
        self._base |= {"HOROVOD_ELASTIC": "1", "DAD_ELASTIC": "1"}
        self._base.setdefault("HOROVOD_ELASTIC_TIMEOUT", f"{elastic.settings.elastic_timeout:g}")
        self._base["DAD_JOB_ID"] = server.job = self._job = self._base["DAD_JOB_ID"] or new_job_id()
        self._endpoints = Endpoints(server, self._asked, self._registered)
        self._processes: dict[Seat, RankProcess] = {}
        self._seats: dict[RankProcess, Seat] = {}
        self._is_warm = warm.is_worth_it(plan.command, self._base)
        self._nurseries: dict[str, str] = {}  # by host
        self._ended: dict[tuple[Seat, float], RankProcess] = {}
        self._starts: collections.Counter[Seat] = collections.Counter()
        self._addresses: dict[Seat, WorkerAddress] = {}
        self._is_local: dict[str, bool] = {}
        self._events: collections.deque[Callable[[float], None]] = collections.deque()
        self._events_lock = threading.Lock()
        self._probing: set[Seat] = set()
        self._wakeup, self._waker = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._waker, False)
        self._talk = ThreadPoolExecutor(8, thread_name_prefix="dad-elastic")

    def run(self) -> Outcome:
        self._pool.watch(self._wakeup, self._swallow)
        try:
            with self._pool.in_charge(SIGN_OF_LIFE_SECONDS):
                if self._script is None:
                    self._run()
                else:
                    with Watcher(self._script, self._hosts_found, self._say_later):
                        self._run()
        finally:
            self._endpoints.hang_up()
            self._talk.shutdown(wait=False, cancel_futures=True)
        return Outcome(self._conclude(), self._driver.size)

    def _run(self) -> None:
        driver, pool = self._driver, self._pool
        driver.hosts_found(self._reachable(self._plan.hosts), time.monotonic())
        while True:
            now = time.monotonic()
            is_over = driver.verdict is not None or pool.stopped_at is not None
            if is_over:
                pool.stop()
                self._endpoints.hang_up()
                if not pool.ranks:
                    return
            for rank in pool.step(None if is_over else driver.next_tick(now) - now):
                pool.drain(rank)
                self._exited(rank)
            if pool.stopped_at is None:
                self._bring_events()
                driver.tick(time.monotonic())

    # ---- events; events of other threads wait for the loop

    def _post(self, event: Callable[[float], None]) -> None:
        with self._events_lock:
            self._events.append(event)
        with contextlib.suppress(BlockingIOError):  # it is awake
            os.write(self._waker, b".")

    def _swallow(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)

    def _bring_events(self) -> None:
        while True:
            with self._events_lock:
                if not self._events:
                    return
                event = self._events.popleft()
            event(time.monotonic())

    def _asked(self, seat: Seat) -> None:
        self._post(lambda now: self._driver.asked(seat, now))

    def _registered(self, seat: Seat, address: WorkerAddress) -> None:
        if not address.key:  # it has the key that is made from the job's secret
            if not self._server.secret:
                return
            address = replace(address, key=notification_key(self._server.secret, str(seat)), greets=True)

        def note(now: float) -> None:
            if seat not in self._processes:
                return
            self._addresses[seat] = address
            self._driver.registered(seat, now)
            # It is in training: there is time to prepare what others may need later.
            if self._is_warm and seat.host not in self._nurseries and self._pool.stopped_at is None:
                self._start_nursery(seat.host)

        if notify.ping(address, _NOTIFY_SECONDS):
            self._post(note)
        else:
            self._say_later(f"dadrun: the notification service of {seat} does not answer")

    def _hosts_found(self, hosts: list[Host]) -> None:
        reachable = self._reachable(hosts)
        self._post(lambda now: self._driver.hosts_found(reachable, now))

    def _say_later(self, text: str) -> None:
        self._post(lambda _now: self.say(text))

    def _reachable(self, hosts: list[Host]) -> list[Host]:
        """Removes hosts that cannot reach us where we listen."""
        if self._script is None or not self._net.address.startswith("127."):
            return hosts
        ours = []
        for host in hosts:
            if host.name not in self._is_local:
                self._is_local[host.name] = network.is_local(host.name)
                if not self._is_local[host.name]:
                    self._say_later(
                        f"dadrun: {host.name} is not used: this job began on this machine alone and talks "
                        "over its loopback interface; to be able to grow it needs --network-interface NAME"
                    )
            if self._is_local[host.name]:
                ours.append(host)
        return ours

    def _exited(self, rank: RankProcess) -> None:
        if rank not in self._seats:
            return  # a nursery: workers start without it
        seat = self._seats.pop(rank)
        del self._processes[seat]
        self._addresses.pop(seat, None)
        self._endpoints.hang_up(seat)
        if self._pool.stopped_at is not None:
            return
        now = time.monotonic()
        self._ended[seat, now] = rank
        code = rank.exit_code or 0
        self._driver.exited(seat, code, how_it_ended(rank), now, lost_peer(rank) is not None)

    # ---- Actions

    def start(self, place: Slot, is_newcomer: bool) -> None:
        seat = Seat(place.host, place.local_rank)
        environment = {**self._base, **worker_variables(place, self._net, self._server.port)}
        # Their final number is unknown, so init() asks when this worker is ready to join.
        for name in ("DAD_SIZE", "HOROVOD_SIZE"):
            del environment[name]
        is_remote = place.host in self._net.remote_hosts or not self._is_here(place.host)
        rank = start_rank(
            self._plan,
            place,
            environment,
            is_remote,
            self._pool.tracebacks,
            is_again=self._starts[seat] > 0,
            silence_seconds=SILENCE_SECONDS,
            nursery=self._nurseries.get(place.host, ""),
            secret=self._server.secret,
        )
        self._starts[seat] += 1
        self._processes[seat], self._seats[rank] = rank, seat
        self._pool.add(rank)

    def answer(self, seat: Seat, place: Slot | None) -> None:
        self._endpoints.answer(seat, REMOVED if place is None else format_place(place))

    def is_waiting(self, seat: Seat) -> bool:
        return self._endpoints.is_waiting(seat)

    def notify(self, seat: Seat, timestamp: int, result: int) -> None:
        address = self._addresses[seat]

        def tell() -> None:
            if not notify.tell_hosts_updated(address, timestamp, result, _NOTIFY_SECONDS):
                self._post(lambda _now: self._driver.not_told(seat))

        self._talk.submit(tell)

    def probe(self, seat: Seat) -> None:
        address = self._addresses.get(seat)
        if address is None or seat in self._probing:
            return
        self._probing.add(seat)

        def ask() -> None:
            answers = notify.ping(address, _NOTIFY_SECONDS)

            def note(now: float) -> None:
                self._probing.discard(seat)
                if answers:
                    self._driver.answered_probe(seat, now)

            self._post(note)

        self._talk.submit(ask)

    def end(self, seat: Seat, at_once: bool = False) -> None:
        if rank := self._processes.get(seat):
            self._pool.end([rank], *([KILL] if at_once else []))

    def begin_round(self, ranks: dict[Seat, int]) -> None:
        self._server.begin_round()
        self._server.put(round_name.SCOPE, round_name.KEY, round_name.new_name(self._job))
        for seat, number in ranks.items():
            if rank := self._processes.get(seat):
                rank.label = f"rank {number}"
                rank.stdout.rank = rank.stderr.rank = number

    def _start_nursery(self, host: str) -> None:
        """Its output is discarded: the workers themselves report errors of the imports."""
        self._nurseries[host] = name = warm.new_name()
        place = Slot(host, 0, 1, 0, sum(seat.host == host for seat in self._processes), 0, 1)
        environment = {**self._base, **worker_variables(place, self._net, self._server.port)}
        command = warm.nursery_command(self._plan.command, name)
        is_remote = host in self._net.remote_hosts or not self._is_here(host)
        if is_remote:
            process = remote.start_remote(
                host, self._plan.ssh, command, environment, working_directory(), SILENCE_SECONDS, alone=True
            )
        else:
            process = remote.start_local(command, environment, working_directory(), alone=True)
        streams = [RankStream(0, name, Nowhere()) for name in ("stdout", "stderr")]
        self._pool.add(RankProcess(f"warm start on {host}", host, is_remote, process, *streams))

    def abandon_round(self) -> None:
        self._server.abandon_round()

    def say(self, text: str) -> None:
        self._pool.say(text)

    def _is_here(self, host: str) -> bool:
        if host not in self._is_local:
            self._is_local[host] = network.is_local(host)
        return self._is_local[host]

    # ---- the end

    def _conclude(self) -> int:
        verdict = self._driver.verdict
        culprit = self._process_of(verdict.culprit) if verdict is not None and verdict.culprit else None
        self._pool.pass_on(self._pool.tracebacks.show_all, culprit and culprit.stderr)
        if self._pool.signals:
            return 128 + self._pool.signals[0]
        if verdict is None:
            return 128 + signal.SIGPIPE
        if verdict.code:
            self._pool.say("\n".join(self._describe(verdict)))
        return verdict.code

    def _describe(self, verdict: Verdict) -> list[str]:
        lines = []
        first = verdict.culprit or (verdict.failures[0] if verdict.failures else None)
        process = self._process_of(first) if first is not None else None
        if first is not None and process is not None:
            lines.append(f"dadrun: rank {first.rank} on {first.seat.host} failed: {first.reason}")
            lines += last_lines(process, self._pool.tracebacks)
            lines += advice(process)
        lines.append(f"dadrun: {verdict.text}")
        others = [failure for failure in verdict.failures if failure is not first]
        if others:
            lines.append("dadrun: why the other workers ended, the last one of each slot:")
        for failure in others[-_MOST_NAMED:]:
            ended = self._process_of(failure)
            said = ended.stderr.tail[-1] if ended is not None and ended.stderr.tail else ""
            lines.append(
                f"  {failure.seat}, rank {failure.rank}: {failure.reason}{': ' if said else ''}{said}"
            )
        return lines

    def _process_of(self, failure: Failure) -> RankProcess | None:
        return self._ended.get((failure.seat, failure.at))
