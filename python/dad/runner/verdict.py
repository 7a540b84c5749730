"""What dadrun prints about a rank that has failed."""

from __future__ import annotations

import re
import signal

from dad.runner.output import ranges
from dad.runner.processes import RankProcess
from dad.runner.tracebacks import TracebackFolder

# What the core says when a peer is gone, in whatever framework's exception it is raised. A peer that has
# closed its connections may still be ending; a silent one does not end by itself.
PEER_ENDED = re.compile(r"\brank (\d+)(?:: | has ).*its output says why")
PEER_LOST = re.compile(rf"{PEER_ENDED.pattern}|\brank (\d+): gave no sign of life")
# ssh's own exit code, unless child.py says that it was the command's.
_SSH_FAILED = 255
_COMMAND_FAILED = "dadrun: the command ended with exit code 255"
# What a rank on another host says if something is missing there.
_IS_MISSING = re.compile(r"dadrun: (cannot start|no python3) |No module named '(dad|horovod)\b")


def how_it_ended(rank: RankProcess) -> str:
    code = rank.exit_code or 0
    if rank.remote and rank.killed_by:
        return f"its ssh client was killed by signal {rank.killed_by}"
    if rank.remote and code == _SSH_FAILED and _COMMAND_FAILED not in rank.stderr.tail:
        return "the ssh connection ended (code 255)"
    if by_signal(code):
        return f"killed by signal {code - 128} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


def advice(rank: RankProcess) -> list[str]:
    lines = []
    if rank.exit_code == 128 + signal.SIGKILL and not (rank.remote and rank.killed_by):
        lines.append(
            "dadrun: the kernel sends SIGKILL when memory runs out; to see whether it did, run on "
            f"{rank.host}: dmesg -T | grep -i 'killed process'"
        )
    if rank.remote and any(_IS_MISSING.search(line) for line in rank.stderr.tail):
        lines.append(
            f"dadrun: {rank.host} needs the same dad for the same interpreter, at the same paths; "
            f"what it lacks is said by: dadrun --doctor -H {rank.host} (and -p, -i as here)"
        )
    return lines


def last_lines(rank: RankProcess, tracebacks: TracebackFolder) -> list[str]:
    if not rank.stderr.tail:
        return ["  it wrote nothing to stderr"]
    same = tracebacks.ranks_with(rank.stderr)
    head = f"of stderr, the same on ranks {ranges(same)}:" if len(same) > 1 else "of its stderr:"
    return [f"  the last lines {head}", *(f"    {line}" for line in rank.stderr.tail)]


def lost_peer(rank: RankProcess, message: re.Pattern[str] = PEER_LOST) -> str | None:
    """The label of the rank whose loss this rank reported last; a script may print an exception that it
    caught."""
    for line in [*reversed(rank.stderr.tail), *reversed(rank.stdout.tail)]:
        if found := message.search(line):
            return f"rank {found[found.lastindex or 0]}"
    return None


def by_signal(code: int | None) -> bool:
    return code is not None and code - 128 in {number.value for number in signal.Signals}
