"""`dadrun --doctor -H …`: checks the lines between hosts. Can every host reach every other, at what rate and
delay, do clocks and versions agree, and what follows for a job?"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from dad.runner.doctor_pairs_worker import MARK
from dad.runner.findings import ABSENT, BROKEN, OK, Finding
from dad.runner.hosts import Host

_SECONDS_FOR_PAIR = 3.0
_START_SECONDS = 90
_MOST_SKEW = 1.0
# A line slower than the median by this factor is named.
_SLOW = 3.0


def examine_pairs(hosts: Sequence[Host], command: Sequence[str]) -> Iterator[Finding]:
    """command: starts one worker (doctor_pairs_worker.py) on each of these hosts."""
    limit = _START_SECONDS + _SECONDS_FOR_PAIR * len(hosts) ** 2
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        yield Finding(
            BROKEN, f"lines between hosts: no result within {limit:.0f} s; try: {shlex.join(command)}"
        )
        return
    found = next((line for line in answer.stdout.splitlines() if MARK in line), None)
    if found is None:
        tail = "\n".join(f"    {line}" for line in answer.stderr.strip().splitlines()[-8:])
        yield Finding(BROKEN, f"lines between hosts: no result; try: {shlex.join(command)}\n{tail}")
        return
    yield from interpret(hosts, json.loads(found.partition(MARK)[2]))


def interpret(hosts: Sequence[Host], found: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """What hosts have found, each with its lines to the others, in the order of `hosts`."""
    names = [host.name for host in hosts]
    lines = {
        (here, int(there)): line for here, one in enumerate(found) for there, line in one["lines"].items()
    }
    yield from _reachability(names, found, lines)
    yield from _clocks(names, lines)
    yield from _versions(names, found)
    good = {pair: line for pair, line in lines.items() if "error" not in line}
    if good:
        yield from _rates(names, good)
        yield from _hierarchy(hosts)


def _reachability(
    names: Sequence[str], found: Sequence[dict[str, Any]], lines: dict[tuple[int, int], Any]
) -> Iterator[Finding]:
    failed = 0
    for (here, there), line in lines.items():
        if "error" not in line:
            continue
        failed += 1
        address = found[there]["address"]
        yield Finding(
            BROKEN,
            f"{names[here]} does not reach {names[there]} at {address}: {line['error']}; is there a route, "
            f"and does a firewall let TCP through to all ports? On {names[here]}: ip route get {address}; on "
            f"{names[there]}: sudo nft list ruleset. Another network: --network-interfaces",
        )
    if not failed:
        yield Finding(OK, f"each of {len(names)} hosts reaches all others")


def _clocks(names: Sequence[str], lines: dict[tuple[int, int], Any]) -> Iterator[Finding]:
    """Compares with the first host."""
    skews = {there: line["skew"] for (here, there), line in lines.items() if here == 0 and "skew" in line}
    wrong = {there: skew for there, skew in skews.items() if abs(skew) > _MOST_SKEW}
    for there, skew in wrong.items():
        how = "ahead of" if skew > 0 else "behind"
        yield Finding(
            ABSENT,
            f"the clock of {names[there]} is {abs(skew):.1f} s {how} that of {names[0]}: jobs work, but "
            f"times in logs do not fit; on {names[there]}: sudo chronyc makestep, or "
            "sudo timedatectl set-ntp true",
        )
    if skews and not wrong:
        most = max(map(abs, skews.values()))
        yield Finding(OK, f"clocks agree within {1e3 * most:.3g} ms")


def _versions(names: Sequence[str], found: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    first = found[0]["versions"]
    differ = False
    for name, one in zip(names[1:], found[1:], strict=True):
        theirs = one["versions"]
        for package in dict.fromkeys([*first, *theirs]):
            ours, other = first.get(package), theirs.get(package)
            if ours == other:
                continue
            differ = True
            must = package in ("dad", "python")
            cure = "" if package == "python" else f"; on {name}: pip install {package}=={ours}"
            yield Finding(
                BROKEN if must else ABSENT,
                f"{package} is {other or 'not there'} on {name} and {ours or 'not there'} on {names[0]}"
                + (cure if ours else ""),
            )
    if not differ:
        shown = ", ".join(f"{package} {version}" for package, version in first.items())
        yield Finding(OK, f"versions are the same on all hosts: {shown}")


def _rates(names: Sequence[str], lines: dict[tuple[int, int], Any]) -> Iterator[Finding]:
    rates = {pair: line["rate"] for pair, line in lines.items()}
    delays = {pair: line["delay"] for pair, line in lines.items()}
    slow, far = min(rates, key=lambda pair: rates[pair]), max(delays, key=lambda pair: delays[pair])
    middle, delay = statistics.median(rates.values()), statistics.median(delays.values())
    text = f"lines: {_rate(middle)} and {1e3 * delay:.3g} ms each way in the middle"
    text += f"; the slowest is {names[slow[0]]} → {names[slow[1]]} with {_rate(rates[slow])}"
    text += f", the longest {names[far[0]]} → {names[far[1]]} with {1e3 * delays[far]:.3g} ms"
    yield Finding(OK, text)
    for (here, there), rate in rates.items():
        if rate * _SLOW < middle:
            yield Finding(
                ABSENT,
                f"{names[here]} → {names[there]} has {_rate(rate)}, others {_rate(middle)}: all ranks wait "
                f"for it; on {names[here]}: ethtool INTERFACE, ip -s link",
            )
    link = f"{max(1, round(8 * rates[slow] / 1e6))}mbit,{1e3 * delays[far]:.3g}ms"
    yield Finding(OK, f"what to send on these lines: dad plan --size {len(names)} --link {link} train.py")


def _hierarchy(hosts: Sequence[Host]) -> Iterator[Finding]:
    several = [host for host in hosts if host.slots > 1]
    if several:
        yield Finding(
            OK,
            f"{len(several)} of {len(hosts)} hosts have several ranks, which share a line: sum inside "
            "hosts first with dadrun --hierarchical-allreduce",
        )


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
