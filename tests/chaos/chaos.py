"""Faults at random times into small jobs of dadrun, and what must hold after each of them.

    python tests/chaos/chaos.py [--seconds 150] [--seed N]     rounds until the time is over
    python tests/chaos/chaos.py --round SEED                   one round again, with its output

A round is drawn from its seed alone: a method, elastic or plain, and a fault: kill -9, SIGSTOP for a while, an
exception on one rank, os._exit(0) on one rank, Ctrl-C, or the launcher killed, at any time from the start of
the job to its end. After it
- the training is right (all ranks have the same bits, and a loss near that of a calm run), or the job ends in
  bounded time with an error that names a rank;
- no process is left, nothing in /dev/shm, and the checkpoint is a whole one.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

TRAINER = Path(__file__).with_name("trainer.py")
METHODS = ("none", "fp16", "exact", "vgc", "rank_dad:rank=2", "powersgd:rank=2", "topk:ratio=0.1")
FAULTS = ("kill", "stop", "raise", "exit0", "ctrl-c", "kill launcher")
RANKS = 3
STEPS = 60
# A job on a busy machine: importing torch alone may take half a minute.
JOB_SECONDS = 150.0
# After the launcher is gone, or was told to stop.
END_SECONDS = 10.0
# Losses of a calm run and of one with faults, relative: other numbers of ranks see other batches.
LOSS_TOLERANCE = 0.5
NAMED = re.compile(r"dadrun: rank \d+ on \S+ failed: |dadrun: .*no rank is left|LostStateError")


@dataclass(frozen=True)
class Round:
    seed: int
    method: str
    is_elastic: bool
    fault: str
    slot: int
    at: float  # of the time that a calm job takes
    pause: float


def draw(seed):
    chance = random.Random(seed)
    return Round(
        seed,
        chance.choice(METHODS),
        chance.random() < 0.6,
        chance.choice(FAULTS),
        chance.randrange(RANKS),
        chance.uniform(0.0, 1.1),
        chance.uniform(0.2, 4.0),
    )


class Job:
    def __init__(self, method, is_elastic):
        self.folder = Path(tempfile.mkdtemp(prefix="dad-chaos-"))
        self.log = self.folder / "output"
        self.shared_memory = set(os.listdir("/dev/shm"))
        command = [sys.executable, "-m", "dad.runner.cli", "-np", str(RANKS)]
        command += ["--min-np", "1"] if is_elastic else []
        mode = "elastic" if is_elastic else "plain"
        command += [sys.executable, str(TRAINER), str(self.folder), method, mode, str(STEPS)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.started_at = time.monotonic()

    def wait(self, seconds):
        """The exit code, None if the job runs on."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def rank_in(self, slot):
        try:
            return psutil.Process(int((self.folder / f"pid.{slot}").read_text()))
        except (OSError, ValueError, psutil.Error):
            return None

    def left_running(self):
        found = []
        for process in psutil.process_iter(["cmdline", "status", "pid"]):
            is_ours = str(self.folder) in (process.info["cmdline"] or [])
            if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def results(self):
        """(digest, loss) by rank."""
        found = re.findall(r"result (\d+) (\S+) (\S+)", self.log.read_text())
        return {int(rank): (digest, float(loss)) for rank, digest, loss in found}

    def clean_up(self):
        for process in [*self.left_running(), self.process]:
            with contextlib.suppress(psutil.Error, OSError):
                process.kill()
        self.process.wait()


def plant(job, this):
    """False if nobody was there."""
    if this.fault in ("ctrl-c", "kill launcher"):
        if job.process.poll() is not None:
            return False
        job.process.send_signal(signal.SIGINT if this.fault == "ctrl-c" else signal.SIGKILL)
        return True
    rank = job.rank_in(this.slot)
    if rank is None:
        return False
    try:
        if this.fault == "kill":
            rank.kill()
        elif this.fault == "stop":
            rank.suspend()
            time.sleep(this.pause)
            rank.resume()
        else:
            (job.folder / f"do.{this.slot}").write_text(this.fault)
    except psutil.Error:
        return False
    return True


def check(job, this, planted, code, calm_loss):
    """What does not hold, as texts."""
    wrong = []
    text = job.log.read_text()
    if code is None:
        wrong.append("the job did not end")
    deadline = time.monotonic() + END_SECONDS
    while (left := job.left_running()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        wrong.append(f"left running: {[process.pid for process in left]}")
    if new := set(os.listdir("/dev/shm")) - job.shared_memory:
        wrong += [f"left in /dev/shm: {name}" for name in new if "dad" in name]
    checkpoint = job.folder / "checkpoint.pt"
    if checkpoint.exists():
        try:
            torch.load(checkpoint, weights_only=False)
        except Exception as error:
            wrong.append(f"the checkpoint is broken: {error}")
    if code == 0:
        results = job.results()
        if not results or sorted(results) != list(range(len(results))):
            wrong.append(f"no result of some ranks: {sorted(results)}")
        elif len({digest for digest, _ in results.values()}) != 1:
            wrong.append("replicas are not bit-equal")
        elif any(abs(loss - calm_loss) > LOSS_TOLERANCE * calm_loss for _, loss in results.values()):
            wrong.append(f"losses {[loss for _, loss in results.values()]}, calm {calm_loss}")
    elif code is not None and this.fault == "ctrl-c":
        if code != 130:
            wrong.append(f"exit code {code} after Ctrl-C")
    elif code is not None and this.fault != "kill launcher" and not NAMED.search(text):
        wrong.append(f"exit code {code} without an error that names a rank")
    may_fail = planted and (not this.is_elastic or this.fault in ("ctrl-c", "kill launcher"))
    if code not in (0, None) and not may_fail and "LostStateError" not in text:
        wrong.append(f"exit code {code}, though the job should have gone on")
    return wrong


def calm(method):
    """Seconds and loss of a job without faults."""
    job = Job(method, is_elastic=False)
    code = job.wait(JOB_SECONDS)
    seconds = time.monotonic() - job.started_at
    try:
        if code != 0:
            sys.exit(f"a calm job with {method} ended with {code}:\n{job.log.read_text()}")
        return seconds, job.results()[0][1]
    finally:
        job.clean_up()


def run(this, seconds, calm_loss, keep_output=False):
    job = Job(this.method, this.is_elastic)
    try:
        code = job.wait(this.at * seconds)
        planted = False
        while code is None and not planted:  # the rank may not be there yet
            planted = plant(job, this)
            code = job.wait(0.05)
        told_to_end = planted and this.fault in ("ctrl-c", "kill launcher")
        code = job.wait(END_SECONDS if told_to_end else JOB_SECONDS)
        wrong = check(job, this, planted, code, calm_loss)
        took = time.monotonic() - job.started_at
        mode = "elastic" if this.is_elastic else "plain"
        outcome = "; ".join(wrong) or ("right" if code == 0 else "named" if planted else "ended")
        fault = f"{this.fault} {this.slot}" + ("" if planted else " (not met)")
        print(
            f"{this.seed:>10}  {this.method:<16} {mode:<8} {fault:<24} {this.at * seconds:5.1f} s  "
            f"code {code!s:<5} {took:5.1f} s  {outcome}",
            flush=True,
        )
        if keep_output or wrong:
            print(job.log.read_text(), flush=True)
        return not wrong
    finally:
        job.clean_up()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--round", type=int, default=None)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    end = time.monotonic() + arguments.seconds
    known = {}

    def of(method):
        if method not in known:
            known[method] = calm(method)
        return known[method]

    if arguments.round is not None:
        this = draw(arguments.round)
        sys.exit(0 if run(this, *of(this.method), keep_output=True) else 1)
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    chance = random.Random(seed)
    print(f"chaos: seed {seed}; a round again: python {sys.argv[0]} --round SEED", flush=True)
    print(f"{'seed':>10}  {'method':<16} {'job':<8} {'fault, slot':<24} {'at':>7}  end", flush=True)
    failed, count, longest = [], 0, 0.0
    while time.monotonic() + longest < end or count == 0:
        this = draw(chance.randrange(10**9))
        began = time.monotonic()
        if not run(this, *of(this.method)):
            failed.append(this.seed)
        longest = max(longest, time.monotonic() - began)
        count += 1
    print(f"chaos: {count} rounds, {len(failed)} failed{': ' if failed else ''}{failed or ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
