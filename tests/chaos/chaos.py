"""Faults at random times into small jobs of dadrun, and what must hold after each of them.

    python tests/chaos/chaos.py [--seconds 150] [--seed N]     rounds until the time is over
    python tests/chaos/chaos.py --round SEED                   one round again, with its output

A round is drawn from its seed alone: a method, elastic or plain, and a fault at any time from the start of the
job to its end: kill -9, SIGSTOP for a while, an exception on one rank, os._exit(0) on one rank, a rank that is
ten times slower, one that gets no more memory, a full disk under timeline, report and checkpoints, a second job,
Ctrl-C, or the launcher killed; and where there are network namespaces (lab.py), on three hosts, a line that is cut
for a while, one of 1 Mbit, and 5 % loss. After it
- the training is right (all ranks have the same bits, and a loss near that of a calm run), or the job ends in
  bounded time with an error that names a rank;
- no process is left, nothing in /dev/shm, no half-written file, and the checkpoint is a whole one.
"""

import argparse
import collections
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import lab as labs
import psutil
import torch

TRAINER = Path(__file__).with_name("trainer.py")
METHODS = ("none", "fp16", "exact", "vgc", "rank_dad:rank=2", "powersgd:rank=2", "topk:ratio=0.1")
FAULTS = ("kill", "stop", "raise", "exit0", "ctrl-c", "kill launcher", "slow", "no memory", "second job")
ROOT_FAULTS = ("full disk",)
LINE_FAULTS = ("line cut", "1 mbit", "5 % loss")
# After these a rank need not be lost, or may not be: it is not theirs to end a job.
HARMLESS = ("slow", "full disk", "second job", "1 mbit", "5 % loss")
RANKS = 3
DISK_KILOBYTES = 512
# That a rank of a job on lines may be silent.
LINE_TIMEOUT_SECONDS = "5"
STEPS = 60
# A job on a busy machine: importing torch alone may take half a minute.
JOB_SECONDS = 150.0
# After the launcher is gone, or was told to stop.
END_SECONDS = 10.0
# A worker whose line was cut hears of the end by its silence.
CUT_END_SECONDS = 40.0
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


def possible_faults():
    return FAULTS + ROOT_FAULTS * (os.geteuid() == 0) + LINE_FAULTS * labs.is_possible()


def draw(seed):
    """What this machine cannot do is drawn like the rest: a seed means the same everywhere."""
    chance = random.Random(seed)
    return Round(
        seed,
        chance.choice(METHODS),
        chance.random() < 0.6,
        chance.choice(FAULTS + ROOT_FAULTS + LINE_FAULTS),
        chance.randrange(RANKS),
        # As often at the start, and at the end, as in between.
        chance.choice((chance.uniform(0.0, 0.4), chance.uniform(0.4, 0.9), chance.uniform(0.9, 1.1))),
        chance.uniform(0.2, 4.0),
    )


class Job:
    """lab: the hosts it runs on; None: this machine. disk: what FOLDER/disk is, and what is written there."""

    def __init__(self, method, is_elastic, lab=None, has_small_disk=False):
        self.folder = Path(tempfile.mkdtemp(prefix="dad-chaos-"))
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        self.log = self.folder / "output"
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.end_seconds = END_SECONDS if lab is None else CUT_END_SECONDS
        command = [sys.executable, "-m", "dad.runner.cli", "-np", str(RANKS)]
        command += ["--min-np", "1"] if is_elastic else []
        self.has_small_disk = has_small_disk
        if has_small_disk:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_KILOBYTES}k", "dad-chaos", self.disk]
            subprocess.run(mount, check=True)
            command += [
                "--report",
                str(self.disk / "report"),
                "--timeline-filename",
                str(self.disk / "timeline"),
            ]
        environment = dict(os.environ)
        if lab is not None:
            command = [*lab.inside(0), *command, "-H", ",".join(f"{host}:1" for host in lab.hosts)]
            environment |= {**lab.environment(), "DAD_TIMEOUT_SECONDS": LINE_TIMEOUT_SECONDS}
        mode = "elastic" if is_elastic else "plain"
        command += [sys.executable, str(TRAINER), str(self.folder), method, mode, str(STEPS)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
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
        if self.has_small_disk:
            subprocess.run(["umount", "--lazy", self.disk], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def plant(job, this, lab):
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
        elif this.fault == "full disk":
            with contextlib.suppress(OSError), (job.disk / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(4096))
                    filler.flush()
        elif this.fault == "line cut":
            lab.plug(this.slot, "down")
            time.sleep(3.0 * this.pause)
            lab.plug(this.slot, "up")
        elif this.fault == "1 mbit":
            lab.throttle(this.slot, "1mbit")
            time.sleep(this.pause)
            lab.throttle(this.slot, None)
        elif this.fault in ("second job", "5 % loss"):
            pass  # it has been there from the beginning
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
    deadline = time.monotonic() + job.end_seconds
    while (left := job.left_running()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        wrong.append(f"left running: {[process.pid for process in left]}")
    if new := set(os.listdir("/dev/shm")) - job.shared_memory:
        wrong += [f"left in /dev/shm: {name}" for name in new if "dad" in name]
    known = ("checkpoint.pt", "filler", "report", "timeline")
    wrong += [f"left on disk: {file.name}" for file in job.disk.iterdir() if not file.name.startswith(known)]
    checkpoint = job.disk / "checkpoint.pt"
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
    may_fail = planted and this.fault not in HARMLESS
    may_fail = may_fail and (not this.is_elastic or this.fault in ("ctrl-c", "kill launcher"))
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
    with contextlib.ExitStack() as stack:
        lab = None
        if this.fault in LINE_FAULTS:
            line = ("100mbit", "1", "5%") if this.fault == "5 % loss" else ("none",)
            lab = stack.enter_context(labs.Lab(f"chaos{os.getpid()}", RANKS, *line))
        job = Job(this.method, this.is_elastic, lab, has_small_disk=this.fault == "full disk")
        stack.callback(job.clean_up)
        other = None
        code = job.wait(this.at * seconds)
        if this.fault == "second job":
            other = Job("none", not this.is_elastic)
            stack.callback(other.clean_up)
        planted = False
        while code is None and not planted:  # the rank may not be there yet
            planted = plant(job, this, lab)
            code = job.wait(0.05)
        told_to_end = planted and this.fault in ("ctrl-c", "kill launcher")
        code = job.wait(END_SECONDS if told_to_end else JOB_SECONDS)
        wrong = check(job, this, planted, code, calm_loss)
        if other is not None:
            digests = (
                {digest for digest, _ in other.results().values()} if other.wait(JOB_SECONDS) == 0 else set()
            )
            if len(digests) != 1:
                wrong.append(f"the second job: {other.log.read_text()[-2000:]}")
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
        return "wrong" if wrong else outcome


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
        if this.fault not in possible_faults():
            sys.exit(f"{this.fault}: needs root and network namespaces")
        sys.exit(run(this, *of(this.method), keep_output=True) == "wrong")
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    chance = random.Random(seed)
    print(f"chaos: seed {seed}; a round again: python {sys.argv[0]} --round SEED", flush=True)
    print(f"{'seed':>10}  {'method':<16} {'job':<8} {'fault, slot':<24} {'at':>7}  end", flush=True)
    failed, longest = [], 0.0
    outcomes = collections.Counter()
    while time.monotonic() + longest < end or not outcomes:
        this = draw(chance.randrange(10**9))
        if this.fault not in possible_faults():
            continue
        began = time.monotonic()
        outcome = run(this, *of(this.method))
        outcomes[this.fault, outcome] += 1
        if outcome == "wrong":
            failed.append(this.seed)
        longest = max(longest, time.monotonic() - began)
    print("chaos: " + ", ".join(f"{fault} {how} {n}" for (fault, how), n in sorted(outcomes.items())))
    print(f"chaos: {outcomes.total()} rounds, {len(failed)} failed{': ' if failed else ''}{failed or ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
