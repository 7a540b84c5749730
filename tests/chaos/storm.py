"""A storm: ranks of an elastic job are killed at random while it trains; what it does in spite of them.

    python tests/chaos/storm.py [--ranks 16] [--faults-per-hour 600] [--seconds 300] [--hosts 4] [--seed N]

With --hosts the ranks are on as many hosts of tools/netlab (lab.py, needs root), else on this machine. A fault is
kill -9 of any rank that is there, in training or on its way; one in ten is SIGSTOP for some seconds instead. At
the end the job is told to finish: all ranks must end well, with the same bits. The table compares with a calm part
before the storm.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from lab import Lab

WORKER = Path(__file__).with_name("storm_worker.py")
PACKAGE_ROOT = Path(__file__).parents[2] / "python"
STOP_SHARE = 0.1  # of the faults
START_SECONDS = 180.0
FINISH_SECONDS = 120.0


class Storm:
    def __init__(self, ranks, lab, step_seconds):
        self.ranks = ranks
        self.folder = Path(tempfile.mkdtemp(prefix="dad-storm-"))
        command = [
            sys.executable,
            "-m",
            "dad.runner.cli",
            "--prefix-output-with-timestamp",
            "-np",
            str(ranks),
            "--min-np",
            str(ranks // 2),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE_ROOT)}
        if lab is not None:
            command += ["-H", ",".join(f"{host}:{ranks // lab.count}" for host in lab.hosts)]
            command = [*lab.inside(0), *command]
            environment |= lab.environment()
        command += [sys.executable, str(WORKER), str(self.folder), str(step_seconds)]
        self.output = self.folder / "output"
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def events(self):
        """Of all processes that there ever were: (slot, event), in the order of time."""
        found = []
        for file in self.folder.glob("log.*"):
            for line in file.read_text().splitlines():
                with contextlib.suppress(ValueError):  # cut off in the middle
                    found.append((file.name.removeprefix("log."), json.loads(line)))
        return sorted(found, key=lambda one: one[1]["at"])

    def living(self):
        """slot -> process, of the newest that has said that it is ready."""
        newest = {slot: event["pid"] for slot, event in self.events() if event["event"] == "ready"}
        found = {}
        for slot, pid in newest.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and str(self.folder) in process.cmdline():
                    found[slot] = process
        return found

    def wait_for_all(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if any(e["event"] == "step" and e["size"] == self.ranks for _, e in self.events()):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise SystemExit(f"the job did not start:\n{self.output.read_text()}")

    def rage(self, seconds, faults_per_hour, chance):
        """The faults: (time, slot, pid, kind)."""
        faults, end = [], time.monotonic() + seconds
        while self.process.poll() is None:
            pause = chance.expovariate(faults_per_hour / 3600.0)
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            if time.monotonic() >= end:
                break
            living = self.living()
            if not living:
                continue
            slot = chance.choice(sorted(living))
            kind = "stop" if chance.random() < STOP_SHARE else "kill"
            faults.append((time.monotonic(), slot, living[slot].pid, kind))
            with contextlib.suppress(psutil.Error):
                if kind == "kill":
                    living[slot].kill()
                    continue
                living[slot].suspend()
                time.sleep(chance.uniform(0.5, 3.0))
                living[slot].resume()
        return faults

    def finish(self):
        (self.folder / "finish").touch()
        try:
            return self.process.wait(FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def clean_up(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15.0)
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def committed(events, begin, end):
    """step -> (time, ranks): the last time that it was done, for a step may be repeated."""
    steps = {}
    for _, event in events:
        if event["event"] == "step" and begin <= event["at"] < end:
            steps[event["step"]] = event["at"], event["size"]
    return steps


def rate(events, begin, end):
    """Rank-steps per second, which are samples."""
    return sum(size for _, size in committed(events, begin, end).values()) / (end - begin)


def pauses(events, faults):
    """Seconds without a step, of each survivor of each loss; of those with a loss in them."""
    times = collections.defaultdict(list)
    for slot, event in events:
        if event["event"] == "step":
            times[slot, event["pid"]].append(event["at"])
    kills = [(at, pid) for at, _, pid, kind in faults if kind == "kill"]
    found = []
    for (_, pid), own in times.items():
        for before, after in zip(own, own[1:], strict=False):
            if any(before <= at < after and victim != pid for at, victim in kills):
                found.append(after - before)
    return found


def returns(events, faults):
    """Seconds from a kill to the first step of the next process in that slot."""
    found = []
    for at, slot, pid, kind in faults:
        later = (e["at"] for s, e in events if s == slot and e["event"] == "step" and e["at"] > at)
        nexts = [e["pid"] for s, e in events if s == slot and e["event"] == "step" and e["at"] > at]
        if kind == "kill" and nexts and nexts[0] != pid:
            found.append(next(later) - at)
    return found


def participation(events, faults, begin, end):
    """For each step: the ranks that took part, as a share of the processes that were ready to and alive."""
    killed = {pid: at for at, _, pid, kind in faults if kind == "kill"}
    lives = [(e["at"], killed.get(e["pid"], float("inf"))) for _, e in events if e["event"] == "ready"]
    found = []
    for at, size in committed(events, begin, end).values():
        living = sum(born <= at < died for born, died in lives)
        found.append(min(1.0, size / max(living, 1)))
    return found


def report(storm, faults, calm, stormy, code):
    events = storm.events()
    (calm_begin, calm_end), (begin, end) = calm, stormy
    before, during = rate(events, calm_begin, calm_end), rate(events, begin, end)
    waited, back = sorted(pauses(events, faults)), sorted(returns(events, faults))
    share = participation(events, faults, begin, end)
    results = re.findall(r"result (\d+) (\d+) (\d+) (\S+) (\S+)", storm.output.read_text())
    sizes = [size for _, size in committed(events, begin, end).values()]
    kills = sum(kind == "kill" for *_, kind in faults)
    print(f"faults                         {len(faults)}: {kills} kills, {len(faults) - kills} stops")
    print(
        f"throughput                     {during:.1f} rank-steps/s, calm {before:.1f}: {during / before:.1%}"
    )
    if share:
        good = sum(one >= 0.95 for one in share) / len(share)
        print(
            f"live ranks in a step           {statistics.mean(share):.1%}; 95 % or more in {good:.1%} of steps"
        )
        print(
            f"ranks in a step                {statistics.mean(sizes):.2f} of {storm.ranks}, least {min(sizes)}"
        )
    if waited:
        print(
            f"pause of a survivor            median {statistics.median(waited):.2f} s, worst {waited[-1]:.2f} s"
        )
    if back:
        print(
            f"a killed rank is in training   median {statistics.median(back):.2f} s, worst {back[-1]:.2f} s"
        )
    digests = {(step, digest) for _, _, step, digest, _ in results}
    losses = {loss for *_, loss in results}
    print(
        f"end                            code {code}, {len(results)} results, {len(digests)} digests, loss {losses}"
    )
    return code == 0 and len(digests) == 1 and bool(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--faults-per-hour", type=float, default=600.0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--calm-seconds", type=float, default=30.0)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--keep", help="a file for the output of the job")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab("dadstorm", arguments.hosts, "none")) if arguments.hosts else None
        storm = Storm(arguments.ranks, lab, arguments.step_seconds)
        stack.callback(storm.clean_up)
        where = f"on {arguments.hosts} hosts" if lab else "on this machine"
        print(
            f"storm: seed {seed}, {arguments.ranks} ranks {where}, {arguments.faults_per_hour:g} faults per hour "
            f"for {arguments.seconds:g} s",
            flush=True,
        )
        storm.wait_for_all()
        calm_begin = time.monotonic()
        time.sleep(arguments.calm_seconds)
        begin = time.monotonic()
        faults = storm.rage(arguments.seconds, arguments.faults_per_hour, random.Random(seed))
        end = time.monotonic()
        code = storm.finish()
        if arguments.keep:
            shutil.copy(storm.output, arguments.keep)
        is_right = report(storm, faults, (calm_begin, begin), (begin, end), code)
        if not is_right:
            print(storm.output.read_text()[-6000:])
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
