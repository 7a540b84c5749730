"""dadrun over ssh, against an sshd of our own on another port.

The names node1 and node2 mean this machine to ssh alone, by its configuration, so dadrun takes
them for other hosts.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import dad
from dad.libraries import build_info
from dad.runner.doctor_pairs import interpret
from dad.runner.doctor_pairs_worker import MARK
from dad.runner.hosts import Host
from dad.runner.remote import remote_shell_command
from dad.runner.ssh import SshOptions, check_host

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")
pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None,
    reason="needs ssh and sshd (apt-get install openssh-server openssh-client)",
)
PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
DADRUN = [sys.executable, "-m", "dad.runner.cli"]


@pytest.fixture(scope="module")
def ssh_environment(tmp_path_factory):
    """The environment in which `ssh node1` reaches our sshd."""
    place = tmp_path_factory.mktemp("ssh")
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / key], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (place / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {place}/host_key\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {place}/user_key.pub\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\n"
    )
    (place / "ssh_config").write_text(
        f"Host node1 node2\n HostName 127.0.0.1\n Port {port}\n IdentityFile {place}/user_key\n"
        "Host badkey\n HostName 127.0.0.1\n"
        f" Port {port}\n IdentitiesOnly yes\n IdentityFile {place}/host_key\n"
        f"Host *\n UserKnownHostsFile {place}/known_hosts\n"
    )
    (place / "bin").mkdir()
    wrapper = place / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {place}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as root, sshd wants it and does not make it
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", place / "sshd_config"], stderr=subprocess.DEVNULL)
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    search = f"{place}/bin:{os.environ['PATH']}"
    environment = os.environ | {"PATH": search, "PYTHONPATH": path, "SSH_AUTH_SOCK": ""}
    environment |= {"KNOWN_HOSTS": f"{place}/known_hosts", "USER_KEY": f"{place}/user_key"}
    try:
        for _ in range(100):
            done = subprocess.run(
                [wrapper, "-o", "StrictHostKeyChecking=no", "node1", "true"], capture_output=True
            )
            if done.returncode == 0:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"our sshd does not answer: {done.stderr.decode()}")
        yield environment
    finally:
        server.terminate()
        server.wait()


def dadrun(environment, *args, **options):
    return subprocess.run(
        [*DADRUN, *args], env=environment, capture_output=True, text=True, timeout=120, **options
    )


def marked_processes(mark):
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE and mark in (process.info["cmdline"] or [])
    ]


def wait_until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_ranks_on_two_hosts_see_their_place_and_their_environment(ssh_environment, tmp_path):
    code = "import json, os; print(json.dumps(dict(os.environ, cwd=os.getcwd())))"
    odd = "two\nlines, 'quotes' \"and\" $dollars é"
    done = dadrun(
        ssh_environment | {"ODD": odd, "CUDA_VISIBLE_DEVICES": "3"},
        *("-H", "node1:1,node2:2", sys.executable, "-c", code),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split("]<stdout>:", 1) for line in done.stdout.splitlines())
    seen = [json.loads(lines[f"[{rank}"]) for rank in range(3)]
    assert [rank["DAD_HOSTNAME"] for rank in seen] == ["node1", "node2", "node2"]
    assert [rank["HOROVOD_LOCAL_RANK"] for rank in seen] == ["0", "0", "1"]
    assert [rank["DAD_CROSS_SIZE"] for rank in seen] == ["2", "2", "1"]
    assert all(rank["ODD"] == odd and rank["cwd"] == str(tmp_path) for rank in seen)
    assert all("CUDA_VISIBLE_DEVICES" not in rank for rank in seen)


def test_local_and_remote_ranks_share_a_rendezvous(ssh_environment):
    code = (
        "import os, time\n"
        "from dad.runner.kv import KeyValueClient\n"
        "rank = int(os.environ['DAD_RANK'])\n"
        "client = KeyValueClient(os.environ['DAD_RENDEZVOUS'])\n"
        "client.put('t', str(rank), b'x')\n"
        "client.wait('t', str(1 - rank), time.monotonic() + 20)\n"
    )
    done = dadrun(ssh_environment, "-H", "localhost:1,node1:1", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_failure_on_another_host_ends_all(ssh_environment):
    mark = f"mark-{os.getpid()}-remote-failure"
    code = (
        "import os, sys, time\nif os.environ['DAD_RANK'] == '1': sys.exit('that went wrong')\ntime.sleep(600)"
    )
    done = dadrun(ssh_environment, "-H", "node1:1,node2:1", sys.executable, "-c", code, mark)
    assert done.returncode == 1
    assert "dadrun: rank 1 on node2 failed: exit code 1" in done.stderr
    assert "    that went wrong" in done.stderr
    assert marked_processes(mark) == []


def test_rank_that_exits_with_the_code_of_ssh_is_not_taken_for_a_broken_connection(ssh_environment):
    done = dadrun(ssh_environment, "-H", "node1:1", sys.executable, "-c", "import sys; sys.exit(-1)")
    assert done.returncode == 255
    assert "dadrun: rank 0 on node1 failed: exit code 255\n" in done.stderr


def test_host_that_lacks_dad_is_told_how_to_find_out_more(ssh_environment, tmp_path):
    without_dad = ["env", "-u", "PYTHONPATH", sys.executable, "-S", "-c", "import dad"]
    for command in (["no-such-python", "train.py"], without_dad):
        done = dadrun(ssh_environment, "-H", "node1:1", *command, cwd=tmp_path)
        assert done.returncode != 0
        assert "dadrun: node1 needs the same dad for the same interpreter" in done.stderr
        assert "dadrun --doctor -H node1" in done.stderr


def test_doctor_looks_for_dad_as_a_rank_would(ssh_environment, tmp_path):
    (tmp_path / "dad").mkdir()
    (tmp_path / "dad" / "__init__.py").write_text("__version__ = 'of another time'\n")
    odd = f"import os; os.environ['PYTHONPATH'] = {str(tmp_path)!r}; "
    code = "from dad.runner.doctor import _remote_dad, SshOptions; print(_remote_dad('node1', SshOptions()).text)"
    done = subprocess.run(
        [sys.executable, "-c", odd + code], env=ssh_environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("node1 has dad of another time, this machine"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_launcher_ends_remote_ranks(ssh_environment, number):
    mark = f"mark-{os.getpid()}-{number}"
    code = "import time; print('up', flush=True); time.sleep(600)"
    command = [*DADRUN, "-H", "node1:1,node2:1", sys.executable, "-c", code, mark]
    job = subprocess.Popen(command, env=ssh_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(2):
        assert b"up" in job.stdout.readline()
    job.send_signal(number)
    job.wait(60)
    wait_until(lambda: not marked_processes(mark))


def test_broken_connection_ends_the_rank_and_the_job(ssh_environment):
    mark = f"mark-{os.getpid()}-broken"
    code = "import time; print('up', flush=True); time.sleep(600)"
    command = [*DADRUN, "-H", "node1:1,node2:1", sys.executable, "-c", code, mark]
    job = subprocess.Popen(
        command, env=ssh_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(2):
        assert "up" in job.stdout.readline()
    victim = next(child for child in psutil.Process(job.pid).children() if "node2" in child.cmdline())
    victim.kill()
    _, errors = job.communicate(timeout=20)
    assert job.returncode == 137
    # Nothing has killed the rank itself.
    assert "rank 1 on node2 failed: its ssh client was killed by signal 9\n" in errors
    wait_until(lambda: not marked_processes(mark))


def test_directory_that_the_other_host_lacks_is_said(ssh_environment):
    order = json.dumps({"command": ["true"], "cwd": "/no/such/place"})
    command = ["ssh", "node1", remote_shell_command()]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=ssh_environment, text=True, **pipes) as job:
        job.stdin.write(f"{len(order)}\n{order}")
        job.stdin.flush()  # and stays open: its end would mean that the launcher is gone
        assert job.wait(timeout=20) == 0
        assert "/no/such/place: No such file or directory; running in" in job.stderr.read()


# Both hosts are this machine, so they must not take each other's shared memory for their own.
MPI_HOSTS = {
    "openmpi": ["--mpi-args", "--mca btl tcp,self --mca btl_tcp_if_include lo --oversubscribe"],
    "mpich": [],
}


@pytest.mark.parametrize("kind", MPI_HOSTS)
def test_mpirun_starts_ranks_on_two_hosts(ssh_environment, kind, tmp_path):
    pytest.importorskip("torch")
    mpirun = shutil.which(f"mpirun.{kind}")
    if mpirun is None or f"mpi_{kind}" not in build_info().get("plugins", []):
        pytest.skip(f"no mpirun.{kind}, or dad was built without it")
    wrapper = tmp_path / "mpirun"
    wrapper.write_text(f'#!/bin/sh\nexec {mpirun} "$@"\n')
    wrapper.chmod(0o755)
    code = (
        "import os, torch, dad.torch as hvd\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
        "os.environ['DAD_HOSTNAME'] = 'here' if rank == '0' else 'there'\n"
        "hvd.init()\n"
        "assert hvd.local_size() == (1 if rank == '0' else 2)\n"
        "for count in (10, 100_000):\n"
        "    assert hvd.allreduce(torch.ones(count), op=hvd.Sum).eq(3).all()\n"
        "print(f'rank {hvd.rank()} of {hvd.size()} is done')\n"
    )
    done = dadrun(
        ssh_environment | {"PATH": f"{tmp_path}:{ssh_environment['PATH']}"},
        *("--mpi", *MPI_HOSTS[kind], "-H", "localhost:1,node1:2", sys.executable, "-c", code),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        assert f"rank {rank} of 3 is done" in done.stdout


def test_every_host_that_cannot_be_reached_is_named_with_a_command_to_try(ssh_environment):
    done = dadrun(ssh_environment, "-H", "badkey:1,node1:1,no-such-host.invalid:1", "true")
    assert done.returncode == 2
    assert "cannot reach 2 of 3 hosts" in done.stderr
    assert "badkey: " in done.stderr and "Permission denied" in done.stderr
    assert "no-such-host.invalid: ssh: Could not resolve" in done.stderr
    assert "try: ssh " in done.stderr
    assert "badkey true" in done.stderr
    assert "put one in place (ssh-copy-id badkey)" in done.stderr


def test_host_key_that_has_changed_is_refused_unless_a_flag_accepts_it(ssh_environment, tmp_path):
    known_hosts = Path(ssh_environment["KNOWN_HOSTS"])
    right = known_hosts.read_text()
    place = right.split()[0]
    other = Path(ssh_environment["USER_KEY"]).with_suffix(".pub").read_text().split()
    try:
        known_hosts.write_text(f"{place} {other[0]} {other[1]}\n")
        done = dadrun(ssh_environment, "-H", "node1:1", "true")
        assert done.returncode == 2
        assert "node1: Host key verification failed." in done.stderr
        assert "--ssh-strict-host-key-checking" in done.stderr
        flags = ("--ssh-strict-host-key-checking", "no")
        assert dadrun(ssh_environment, *flags, "-H", "node1:1", "true").returncode == 0
        # A host that is not known yet is another matter.
        known_hosts.write_text("")
        assert dadrun(ssh_environment, "-H", "node1:1", "true").returncode == 0
        known_hosts.write_text("")
        flags = ("--ssh-strict-host-key-checking", "yes")
        assert dadrun(ssh_environment, *flags, "-H", "node1:1", "true").returncode == 2
    finally:
        known_hosts.write_text(right)


def test_key_that_is_not_there_is_named(ssh_environment, tmp_path):
    done = dadrun(ssh_environment, "-i", f"{tmp_path}/key", "-H", "node1:1", "true")
    assert done.returncode == 2
    assert f"node1: the key {tmp_path}/key (-i) is not here" in done.stderr


def test_host_that_does_not_answer_is_given_up_in_time(monkeypatch, tmp_path):
    slow = tmp_path / "ssh"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert check_host("anywhere", SshOptions(), timeout=0.5) == "no answer within 0.5 s"


def test_elastic_job_goes_on_without_a_host_and_takes_it_back(ssh_environment, tmp_path):
    mark = f"mark-{os.getpid()}-elastic"
    worker = str(Path(__file__).parents[1] / "elastic" / "tiny_worker.py")
    command = [*DADRUN, "--min-np", "1", "-H", "node1:1,node2:1", sys.executable, worker, mark]
    job = subprocess.Popen(
        command,
        env=ssh_environment | {"TINY_FOLDER": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []

    def wait_for(*texts):
        left = list(texts)
        while left:
            lines.append(job.stdout.readline())
            assert lines[-1], "".join(lines)
            left = [text for text in left if text not in lines[-1]]

    wait_for("node1:0 meets 2", "node2:0 meets 2")
    victim = next(child for child in psutil.Process(job.pid).children() if "node1" in child.cmdline())
    victim.kill()  # the connection to rank 0's host
    wait_for("rank 0 on node1 was lost: its ssh client was killed by signal 9", "node2:0 meets 1")
    wait_for("node2:0 meets 2", "node1:0 meets 2")
    (tmp_path / "finish").touch()
    lines.append(job.communicate(timeout=30)[0])
    assert job.returncode == 0, "".join(lines)
    assert "node2:0 place 0 1 0 1 0 1" in "".join(lines)
    wait_until(lambda: not marked_processes(mark))


def test_the_doctor_looks_at_the_lines_between_hosts(ssh_environment):
    worker = (sys.executable, "-m", "dad.runner.doctor_pairs_worker")
    done = dadrun(ssh_environment, "-H", "node1:1,node2:1", *worker)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition(MARK)[2])
    told = [finding.text for finding in interpret([Host("node1", 2), Host("node2", 1)], found)]
    assert told[0] == "each of 2 hosts reaches all others"
    assert any("--hierarchical-allreduce" in text for text in told)
