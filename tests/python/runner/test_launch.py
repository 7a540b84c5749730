"""dadrun with real processes on this machine."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest

import dad
from dad.runner.job import Job
from dad.runner.output import RankStream
from dad.runner.processes import RankProcess
from dad.runner.remote import CHILD
from dad.runner.tracebacks import TracebackFolder

PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
DADRUN = [sys.executable, "-m", "dad.runner.cli"]


def environment(**more):
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | more


def dadrun(*args, timeout=30, **variables):
    return subprocess.run(
        [*DADRUN, *args], env=environment(**variables), capture_output=True, text=True, timeout=timeout
    )


def start_dadrun(*args):
    return subprocess.Popen(
        [*DADRUN, *args], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def marked_processes(mark):
    """All living processes that carry `mark` on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and mark in (process.info["cmdline"] or []):
            found.append(process)
    return found


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def sleeping_child(mark):
    """Code that starts a process which nobody waits for."""
    command = f"[sys.executable, '-c', 'import time; time.sleep(600)', '{mark}']"
    return f"import subprocess, sys; subprocess.Popen({command})"


def sleeper(mark):
    """A rank that starts a process of its own; both carry the mark."""
    return [sys.executable, "-c", f"{sleeping_child(mark)}; import time; time.sleep(600)", mark]


def test_workers_see_their_place():
    code = (
        "import json, os; print(json.dumps({k: v for k, v in os.environ.items()"
        " if k.startswith(('DAD_', 'HOROVOD_', 'PYTHONUNB'))}))"
    )
    done = dadrun("-np", "2", "--compression", "fp16", sys.executable, "-c", code, DAD_RANK="77")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        (line,) = [x for x in done.stdout.splitlines() if x.startswith(f"[{rank}]<stdout>:")]
        seen = json.loads(line.partition(":")[2])
        for family in ("DAD", "HOROVOD"):
            assert seen[f"{family}_RANK"] == seen[f"{family}_LOCAL_RANK"] == str(rank)
            assert seen[f"{family}_SIZE"] == seen[f"{family}_LOCAL_SIZE"] == "2"
            assert (seen[f"{family}_CROSS_RANK"], seen[f"{family}_CROSS_SIZE"]) == ("0", "1")
            assert seen[f"{family}_HOSTNAME"] == "localhost"
            assert seen[f"{family}_GLOO_IFACE"] == "lo"
        address = f"{seen['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{seen['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        assert seen["DAD_RENDEZVOUS"] == f"http://{address}"
        assert seen["HOROVOD_CONTROLLER"] == seen["HOROVOD_CPU_OPERATIONS"] == "gloo"
        assert (seen["PYTHONUNBUFFERED"], seen["DAD_COMPRESSION"]) == ("1", "fp16")


# ---- output


class Sink:
    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data

    def flush(self):
        pass


@pytest.mark.parametrize("pieces", [[b"a\nb\r\nc\rd"], [b"a", b"\nb\r", b"\nc\r", b"d"]])
def test_every_line_has_a_prefix_however_it_arrives(pieces):
    sink = Sink()
    stream = RankStream(3, "stderr", sink)
    for piece in pieces:
        stream.feed(piece)
    stream.close()
    assert sink.data == b"[3]<stderr>:a\n[3]<stderr>:b\r\n[3]<stderr>:c\r[3]<stderr>:d\n"
    assert list(stream.tail) == ["a", "b", "c", "d"]


TRACEBACK = b"Traceback (most recent call last):\n  File 'x', line 1\nValueError: no luck\n"
CHAINED = TRACEBACK + b"\nDuring handling of the above exception, another exception occurred:\n\n" + TRACEBACK


def streams_with_tracebacks(*texts):
    sink, folder = Sink(), TracebackFolder(hold_seconds=0)
    streams = [RankStream(rank, "stderr", sink, tracebacks=folder) for rank in range(len(texts))]
    for stream, text in zip(streams, texts, strict=True):
        stream.feed(text)
    return sink, folder, streams


def labelled(label, text):
    return b"".join(b"[%s]<stderr>:%s" % (label, line) for line in text.splitlines(keepends=True))


def test_equal_tracebacks_are_shown_once_and_others_as_they_are():
    sink, folder, streams = streams_with_tracebacks(
        b"hello\n" + TRACEBACK, CHAINED, TRACEBACK + b"bye 2\n", TRACEBACK + b"bye\n", TRACEBACK + b"bye\n"
    )
    assert sink.data == b"[0]<stderr>:hello\n"
    folder.show_all(first=streams[1])
    shown = labelled(b"1", CHAINED) + labelled(b"0, 2-4", TRACEBACK)
    shown += labelled(b"2", b"bye 2\n") + labelled(b"3-4", b"bye\n")
    assert sink.data == b"[0]<stderr>:hello\n" + shown
    assert folder.ranks_with(streams[3]) == [0, 2, 3, 4]
    assert folder.ranks_with(streams[1]) == [1]


def test_traceback_of_a_rank_that_goes_on_is_not_kept_back():
    sink, folder, (stream,) = streams_with_tracebacks(TRACEBACK + b"caught\n")
    folder.show_due()
    stream.feed(b"next\n")
    assert sink.data == labelled(b"0", TRACEBACK + b"caught\nnext\n")


def test_ranks_that_fail_alike_are_named_together(tmp_path):
    # All have come before one raises, and all have raised before one ends, which would stop the others.
    script = (
        "import os, pathlib, sys, time, traceback\n"
        "def meet(what):\n"
        f"    folder = pathlib.Path({str(tmp_path)!r})\n"
        "    (folder / (what + '.' + os.environ['DAD_RANK'])).touch()\n"
        "    while len(list(folder.glob(what + '.*'))) < 3: time.sleep(0.01)\n"
        "meet('before')\n"
        "try: raise ValueError('no luck')\n"
        "except ValueError: traceback.print_exc()\n"
        "meet('after')\n"
        "sys.exit(1)\n"
    )
    done = dadrun("-np", "3", sys.executable, "-c", script)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 2  # and once more in the summary
    assert "[0-2]<stderr>:ValueError: no luck\n" in done.stderr
    assert "the same on ranks 0-2:\n    Traceback" in done.stderr


def test_line_without_an_end_does_not_pile_up():
    sink = Sink()
    stream = RankStream(0, "stdout", sink, prefix=False)
    for _ in range(100):
        stream.feed(b"x" * 10_000)
    assert len(sink.data) > 900_000


def test_output_goes_to_files_too(tmp_path):
    code = "import os, sys; print('out', os.environ['DAD_RANK']); print('err', file=sys.stderr)"
    out = tmp_path / "logs"
    done = dadrun("-np", "11", "--output-filename", str(out), "-prefix-timestamp", sys.executable, "-c", code)
    assert done.returncode == 0
    assert sorted(place.name for place in out.iterdir()) == [f"rank.{rank:02d}" for rank in range(11)]
    assert (out / "rank.07" / "stdout").read_text() == "out 7\n"
    assert (out / "rank.10" / "stderr").read_text() == "err\n"
    assert "[7]<stdout>:out 7" in done.stdout
    assert time.asctime()[:3] in done.stdout


WRITES_AND_FAILS = """
import os, sys, time
rank = os.environ["DAD_RANK"]
print("out of", rank, flush=True)
if rank == "1":
    sys.exit("it is over")
time.sleep(20)
"""


@pytest.mark.parametrize("output", ["merged", "split"])
def test_output_without_tags_and_in_files_only(output, tmp_path):
    job = dadrun(
        *("-np", "2", "--output", output, "--output-filename", str(tmp_path)),
        *(sys.executable, "-c", WRITES_AND_FAILS),
    )
    assert job.returncode == 1
    assert (tmp_path / "rank.1" / "stderr").read_text() == "it is over\n"
    assert (tmp_path / "rank.0" / "stdout").read_text() in ("out of 0\n", "")  # it may be ended before
    assert ("out of 1\n" in job.stdout.splitlines(keepends=True)) == (output == "merged")
    assert "<std" not in job.stdout + job.stderr
    # Whoever sees nothing of the output is told all the same which rank it was, and why.
    assert "rank 1" in job.stderr and "    it is over" in job.stderr


def test_split_output_needs_a_place_to_go():
    job = dadrun("-np", "2", "--output", "split", "true")
    assert job.returncode == 2 and "needs --output-filename" in job.stderr


# ---- the end


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raise ValueError('no luck')", 1, "exit code 1"),
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by signal 9 (SIGKILL)"),
        ("os.abort()", 134, "(SIGABRT)"),
    ],
)
def test_one_failure_ends_all_and_is_explained(how, code, text):
    mark = f"mark-{os.getpid()}-{code}"
    script = (
        "import os, sys, time\n"
        f"if os.environ['DAD_RANK'] == '1':\n print('hm', file=sys.stderr)\n {how}\n"
        "time.sleep(600)"
    )
    start = time.monotonic()
    done = dadrun("-np", "3", sys.executable, "-c", script, mark)
    assert time.monotonic() - start < 8
    assert done.returncode == code
    block = done.stderr[done.stderr.index("dadrun: ") :]
    assert block.startswith("dadrun: rank 1 on localhost failed: ")
    assert text in block
    assert "    hm" in block
    assert "the other 2 ranks were stopped" in block
    assert ("run on localhost: dmesg -T | grep -i 'killed process'" in block) == (code == 137)
    assert marked_processes(mark) == []


def test_only_ranks_that_ran_are_said_to_be_stopped():
    # All have ended by themselves before the launcher looks at the first of them.
    script = "import os, sys; sys.exit(5 * int(os.environ['DAD_RANK']))"
    ranks = [started(script, rank) for rank in range(3)]
    for rank in ranks:
        rank.process.wait()
    messages = io.StringIO()
    assert Job(ranks, messages).run() == 5
    assert messages.getvalue().splitlines() == [
        "dadrun: rank 1 on here failed: exit code 5",
        "  it wrote nothing to stderr",
        "dadrun: rank 0 had ended before, with exit code 0",
        "dadrun: rank 2 (exit code 10) failed too",
    ]


def started(script, rank):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-S", "-c", script]
    process = subprocess.Popen(command, env={"DAD_RANK": str(rank)}, bufsize=0, **pipes)
    streams = [RankStream(rank, name, Sink()) for name in ("stdout", "stderr")]
    return RankProcess(f"rank {rank}", "here", False, process, *streams)


def test_rank_killed_by_a_signal_is_named_before_those_that_noticed():
    # Rank 1 leaves a process behind that takes its time, so rank 0's failure is seen first.
    script = (
        "import os, signal, subprocess, sys, time\n"
        "if os.environ['DAD_RANK'] == '1':\n"
        " subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, lambda *a: None); "
        "[time.sleep(0.1) for _ in range(10)]'])\n"
        " time.sleep(0.5)\n"
        " os.kill(os.getpid(), 9)\n"
        "time.sleep(0.8)\n"
        "sys.exit('my peer is gone')\n"
    )
    done = dadrun("-np", "2", sys.executable, "-c", script)
    assert done.returncode == 137
    assert "rank 1 on localhost failed: killed by signal 9" in done.stderr


LOST = "rank 1 has shut down or ended, and its part in this collective is missing: its output says why"


@pytest.mark.parametrize(
    "how",
    [
        f"sys.exit('dad.errors.DadInternalError: {LOST}')",
        f"sys.exit('tensorflow.python.framework.errors_impl.UnknownError: {{{{node}}}} {LOST} [Op:DadAllreduce]')",
        f"print('[dad rank 0] ERROR: giving up: {LOST}'); sys.exit(1)",
    ],
)
def test_rank_that_fails_is_named_before_those_that_lost_it(how):
    # Rank 1 takes longer to end than rank 0 to hear of it, and rank 2 has heard of it from rank 0.
    script = (
        "import os, sys, time\n"
        "rank = int(os.environ['DAD_RANK'])\n"
        "if rank == 1:\n"
        " time.sleep(2)\n"
        " sys.exit(3)\n"
        "if rank == 2:\n"
        " sys.exit('dad.errors.DadInternalError: rank 0: closed: it ended or was killed, its output says why')\n"
        f"{how}\n"
    )
    done = dadrun("-np", "3", sys.executable, "-c", script)
    assert done.returncode == 3
    assert "rank 1 on localhost failed: exit code 3" in done.stderr


@pytest.mark.parametrize(
    ("lost", "seconds"),
    [("rank 1: gave no sign of life for 2 s", 4), (LOST, 9)],  # the second may still be about to end
)
def test_lost_rank_that_does_not_end_is_shown_beside_the_one_that_lost_it(lost, seconds):
    script = (
        "import os, sys, time\n"
        "if os.environ['DAD_RANK'] == '1':\n"
        " print('deep in thought', file=sys.stderr)\n"
        " os.kill(os.getpid(), 19)\n"
        "time.sleep(0.5)\n"
        "print(time.time(), flush=True)\n"
        f"sys.exit('dad.errors.DadInternalError: {lost}')\n"
    )
    done = dadrun("-np", "2", sys.executable, "-c", script)
    # Counted from there: on a busy machine the interpreters alone take seconds to start.
    assert time.time() - float(done.stdout.partition("<stdout>:")[2]) < seconds
    assert done.returncode == 1
    block = done.stderr[done.stderr.index("dadrun: ") :]
    assert block.startswith("dadrun: rank 0 on localhost failed: exit code 1")
    assert "dadrun: rank 1 on localhost, which it lost, was still there and was stopped\n" in block
    assert "    deep in thought" in block


@pytest.mark.parametrize("seconds", [0, 1.5])  # the interpreter may take longer to end than a peer to notice
def test_rank_that_left_early_is_named_beside_the_one_that_failed(seconds):
    script = (
        "import os, sys, time\n"
        "rank = int(os.environ['DAD_RANK'])\n"
        f"time.sleep([0.5, {seconds}, 600][rank])\n"
        f"sys.exit('dad.errors.DadInternalError: {LOST}' if rank == 0 else 0)\n"
    )
    done = dadrun("-np", "3", sys.executable, "-c", script)
    assert done.returncode == 1
    assert "rank 0 on localhost failed: exit code 1" in done.stderr
    assert "dadrun: rank 1 had ended before, with exit code 0\n" in done.stderr
    assert "dadrun: rank 1 had fewer steps than the others: give all ranks equally" in done.stderr
    assert "dadrun: the other rank was stopped" in done.stderr


def test_rank_that_ignores_sigterm_is_killed():
    mark = f"mark-{os.getpid()}-stubborn"
    script = (
        "import os, signal, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "if os.environ['DAD_RANK'] == '1':\n time.sleep(0.5); os._exit(3)\n"
        "time.sleep(600)"
    )
    start = time.monotonic()
    assert dadrun("-np", "2", sys.executable, "-c", script, mark).returncode == 3
    assert 4 < time.monotonic() - start < 12
    assert marked_processes(mark) == []


def test_command_that_does_not_exist():
    done = dadrun("-np", "2", "no-such-command")
    assert done.returncode == 127
    assert "cannot start no-such-command: No such file or directory" in done.stderr


def test_what_a_rank_leaves_running_ends_with_it():
    mark = f"mark-{os.getpid()}-left"
    assert dadrun("-np", "2", sys.executable, "-c", sleeping_child(mark)).returncode == 0
    assert marked_processes(mark) == []


@pytest.mark.parametrize("how", ["time.sleep(600)", "sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_what_a_rank_starts_in_a_session_of_its_own_ends_with_the_job(how):
    mark = f"mark-{os.getpid()}-session-{len(how)}"
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    script = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, '-c', {stubborn!r}, {mark!r}]\n"
        "left = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\n"
        "print(left.stdout.readline(), flush=True)\n"
        f"{how}\n"
    )
    job = start_dadrun("-np", "1", sys.executable, "-c", script)
    assert "up" in job.stdout.readline()
    if "sleep" in how:
        job.send_signal(signal.SIGINT)
    job.wait(60)
    assert marked_processes(mark) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_to_the_launcher_leaves_nothing_behind(number, code):
    mark = f"mark-{os.getpid()}-{code}"
    job = start_dadrun("-np", "2", *sleeper(mark))
    wait_until(lambda: len(marked_processes(mark)) >= 5)  # two ranks with a child each, and the launcher
    job.send_signal(number)
    assert job.wait(60) == code
    assert marked_processes(mark) == []


def test_ctrl_c_leaves_a_report_of_what_there_is(tmp_path):
    script = (
        "import os, signal, time\n"
        "from dad import basics\n"
        "basics.init()\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(600)\n"
        "os.kill(child, signal.SIGTERM)\n"  # the report is not its business
        "assert os.waitpid(child, 0)[1] == signal.SIGTERM\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    report = tmp_path / "report"
    report.write_text("of another job\n")
    job = start_dadrun("-np", "2", "--report", str(report), sys.executable, "-c", script)
    for _ in range(2):
        assert "up" in job.stdout.readline()
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 130
    assert f"dadrun: {report} has the report of 2 ranks, up to their end\n" in job.stderr.read()
    ranks = [json.loads(line) for line in report.read_text().splitlines()[1:]]
    assert sorted((rank["rank"], rank["ended_by"]) for rank in ranks) == [(0, "SIGTERM"), (1, "SIGTERM")]
    (job_id,) = {rank["job"] for rank in ranks}
    assert job_id
    for rank in ranks:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(rank["time"])
        assert abs(age.total_seconds()) < 3600
    assert all("wire_bytes_sent" in rank["stats"] for rank in ranks)


def test_second_ctrl_c_kills_at_once():
    mark = f"mark-{os.getpid()}-twice"
    script = (
        "import signal, time\n"
        "for number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    job = start_dadrun("-np", "2", sys.executable, "-c", script, mark)
    for _ in range(2):
        assert "up" in job.stdout.readline()
    job.send_signal(signal.SIGINT)
    time.sleep(0.5)
    start = time.monotonic()
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 130
    assert time.monotonic() - start < 2
    assert marked_processes(mark) == []


def test_killed_launcher_leaves_nothing_behind():
    mark = f"mark-{os.getpid()}-killed"
    job = start_dadrun("-np", "2", *sleeper(mark))
    wait_until(lambda: len(marked_processes(mark)) >= 5)
    job.kill()
    job.wait()
    wait_until(lambda: not marked_processes(mark))


def test_reader_that_goes_away_ends_the_job():
    mark = f"mark-{os.getpid()}-head"
    script = "import time\nwhile True: print('x' * 1000, flush=True); time.sleep(0.01)"
    job = start_dadrun("-np", "2", sys.executable, "-c", script, mark)
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(60) == 141
    wait_until(lambda: marked_processes(mark) == [])


def test_order_to_end_reaches_a_rank_that_is_just_being_started(tmp_path):
    """Between the fork and the command, where it still has the handlers of child.py."""
    slow = (
        f"import time; source = open({str(CHILD)!r}).read()\n"
        "found = {'__name__': 'child'}; exec(compile(source, 'child.py', 'exec'), found)\n"
        "def slowly(): open('forked', 'w').close(); time.sleep(1.0); return found['slow'](); \n"
        "found['slow'], found['usable_cores'] = found['usable_cores'], slowly\n"
        "print(found['Child']({'command': ['sleep', '60']}).run(0))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", slow],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    while not (tmp_path / "forked").exists():
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=20)[0].split() == [b"143"]


def test_child_ends_its_rank_after_silence():
    spec = json.dumps({"command": ["sleep", "600"], "silence_seconds": 0.5}).encode()
    child = subprocess.Popen([sys.executable, "-I", "-S", str(CHILD)], stdin=subprocess.PIPE)
    child.stdin.write(b"%d\n" % len(spec) + spec)
    child.stdin.flush()
    assert child.wait(60) == 143
    child.stdin.close()


# ---- what is there


def test_version_and_check_build_work_without_a_build():
    assert dadrun("--version").stdout.strip() == dad.__version__
    command = [sys.executable, "-m", "dad.cli", "--version"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == dad.__version__
    assert Path(dad.__file__).with_name("py.typed").exists()
    done = dadrun("--check-build")
    assert done.returncode == 0
    for word in (
        "Available Frameworks",
        "PyTorch",
        "Available Controllers",
        "Gloo",
        "Available Tensor Operations",
    ):
        assert word in done.stdout
