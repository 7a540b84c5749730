"""Runs the command of one rank, and ends it when the launcher is gone.

    python child.py  <  the length of a JSON text, a newline, that text, then commands of one byte each

The text: {"command": [...], "env": {...} or null, "cwd": "...", "silence_seconds": 0, "grace_seconds": 5}.
The commands: T ends the process group (SIGTERM, SIGKILL after the grace time), K kills it at once, I has the
rank say on stderr what all ranks are doing (dad/observe/inspect.py), any other byte is a sign of life. The
end of the input means that the launcher or the connection to it is gone, and so does `silence_seconds`
without a byte (0: wait for ever).

With "secret": TEXT (base64) the secret of the job is kept in memory that only this user can open, and the
environment of the rank says where: DAD_SECRET_FD is our process and the descriptor, which the rank inherits.

The command's output goes to our own stdout and stderr, untouched. We exit with the command's
code, or 128 + N if signal N killed it, as shells do. ssh exits with 255 when a connection breaks, so on
another host a command that does so is followed by a line that says so.

With "nursery": NAME the rank is forked by elastic/nursery.py, if that runs. With "alone": true processes that
the command has started may outlive it.

A rank of dad gets its share of the cores of the host it runs on, as variables for OpenMP (torch, NumPy),
TensorFlow and dad itself, unless they are set already.

On other hosts this file's text is run with `python -c`, so it needs nothing but Python.
"""

import array
import base64
import contextlib
import ctypes
import errno
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time

SECRET_VARIABLE = "DAD_SECRET_FD"
SECRET_MARK = b"dad secret 1\n"
# The variables from which each library takes its number of threads.
THREAD_VARIABLES = {
    "torch": ("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    "TensorFlow": ("TF_NUM_INTRAOP_THREADS",),
    "dad": ("DAD_THREADS",),
}
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SSH_FAILED = 255
# How the names of the sockets begin at which ranks can be asked what they are doing.
INSPECTED = "dad-rank."
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def prctl(option, value):
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Child:
    # Whether we end with the process that has started us.
    follows_parent = True

    def __init__(self, spec):
        self.leash = None  # a connection whose end is our end
        self.is_alone = spec.get("alone", False)  # what the command starts may outlive it
        self.grace_seconds = spec.get("grace_seconds", 5)
        self.exit_code = None
        self.kill_at = None
        self.strays = set()
        # The write end wakes the loop below when a signal arrives.
        self.wakeup, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Signals wait until there is a rank to end, and until the rank has reset our handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
        for number in ENDINGS:
            signal.signal(number, lambda *_: self.terminate())
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        if not self.is_alone:
            # Orphans of the rank become our children, so that we can wait for all processes that it has
            # started.
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        if self.follows_parent:
            # We notice the launcher's death even if a fork of it still holds our input open.
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        self.pid = self.start(spec)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)

    def start(self, spec):
        parent = os.getpid()
        place = keep_secret(spec.get("secret", ""))
        pid = os.fork()
        if pid:
            # Both sides do it, so the group exists before it is signalled.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            return pid
        environment = spec.get("env") or dict(os.environ)
        environment.pop(SECRET_VARIABLE, None)  # that of a job around this one
        if place:
            environment[SECRET_VARIABLE] = place
        try:
            share_cores(environment, usable_cores())
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            for number in (*ENDINGS, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
            signal.set_wakeup_fd(-1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            self.change_directory(spec.get("cwd"), environment)
        except BaseException as error:
            os.write(2, f"dadrun: cannot start a rank: {error}\n".encode())
            os._exit(127)
        return self.execute(spec["command"], environment)

    def execute(self, command, environment):
        """In the new process, as the last thing."""
        try:
            os.execvpe(command[0], command, environment)
        except OSError as error:
            reason = error.strerror
            # A directory on PATH that cannot be read is not an answer.
            if "/" not in command[0] and shutil.which(command[0], path=environment.get("PATH")) is None:
                reason = os.strerror(errno.ENOENT)
            os.write(2, f"dadrun: cannot start {command[0]}: {reason}\n".encode())
        finally:
            os._exit(127)

    @staticmethod
    def change_directory(wanted, environment):
        try:
            if wanted:
                os.chdir(wanted)
        except OSError as error:
            here = os.getcwd()
            environment["PWD"] = here
            os.write(2, f"dadrun: {wanted}: {error.strerror}; running in {here}\n".encode())

    def signal_group(self, number):
        """Returns False when no process of the group is left."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def terminate(self):
        if self.kill_at is None:
            self.signal_group(signal.SIGTERM)
            self.signal_group(signal.SIGCONT)  # a stopped process would not receive it
            self.kill_at = time.monotonic() + self.grace_seconds

    def end_strays(self):
        """Signals processes that the rank has started in sessions of their own, outside its group. Returns
        False when none is left."""
        if self.is_alone:
            return False
        found = descendants()
        is_late = self.kill_at is not None and time.monotonic() >= self.kill_at
        for pid in found if is_late else found - self.strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        self.strays |= found
        return bool(found)

    def inspect(self):
        """Runs in a process of its own, since a rank may take seconds to answer."""
        ranks = descendants() | {self.pid}
        if os.fork() == 0:
            with contextlib.suppress(OSError):
                os.write(2, ask_rank(ranks))
            os._exit(0)

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def run(self, silence_seconds):
        inputs = [0, self.wakeup] + ([] if self.leash is None else [self.leash])
        last_sign = time.monotonic()
        while True:
            self.reap()
            if self.exit_code is not None:
                # Processes that the rank started and left running end with it.
                self.terminate()
                if not self.signal_group(0) and not self.end_strays():
                    return self.exit_code
            now = time.monotonic()
            if self.kill_at is not None and now >= self.kill_at:
                self.signal_group(signal.SIGKILL)
            if silence_seconds and 0 in inputs and now - last_sign > silence_seconds:
                inputs.remove(0)
                self.terminate()
            busy = self.kill_at is not None
            ready, _, _ = select.select(inputs, [], [], 0.02 if busy else 1.0)
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
            if self.leash in ready:
                inputs.remove(self.leash)
                self.terminate()
            if 0 in ready:
                data = os.read(0, 4096)
                last_sign = now
                if b"K" in data:
                    self.terminate()
                    self.kill_at = now
                elif b"T" in data or not data:
                    self.terminate()
                elif b"I" in data:
                    self.inspect()
                if not data:
                    inputs.remove(0)


def descendants():
    """Our children, theirs, and so on, as long as they run."""
    children = {}
    for entry in os.listdir("/proc"):
        # Not all entries are processes, and one may end while we look.
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{int(entry)}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), set()).add(int(entry))
    found, unseen = set(), {os.getpid()}
    while unseen:
        unseen = {child for pid in unseen for child in children.get(pid, ())} - found
        found |= unseen
    return found


def ask_rank(pids):
    """The answer of the first of these processes that is a rank of dad."""
    why = "no process of this rank has called init()"
    # Anybody may give a socket any name.
    with open("/proc/net/unix", errors="replace") as file:
        names = [line.split()[-1] for line in file if f" @{INSPECTED}" in line]
    for name in dict.fromkeys(names):
        pid = name[len(INSPECTED) + 1 :].partition(".")[0]
        if not pid.isdecimal() or int(pid) not in pids:
            continue
        text = b""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
                rank.settimeout(8)
                rank.connect("\0" + name[1:])
                credentials = rank.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", credentials)[1] != os.geteuid():
                    raise OSError("another user has taken its name")
                while more := rank.recv(1 << 16):
                    text += more
        except OSError as error:
            why = str(error)
        if text:
            return text
    return f"dadrun: this rank does not say what the job is doing: {why}\n".encode()


# ---- cores


def usable_cores(root="/"):
    """The CPUs that this process may run on, and the CPU quota of its cgroup.

    {"cpus": [0, 1], "quota": 1.5, "quota_group": "/sys/fs/cgroup/job"}; quota is None without a limit.
    """
    quotas = [found for directory in cgroup_directories(root) if (found := cpu_quota(directory)) is not None]
    quota, group = min(quotas, default=(None, ""))
    return {"cpus": sorted(os.sched_getaffinity(0)), "quota": quota, "quota_group": group}


def cgroup_directories(root):
    """The groups that may limit this process: its own CPU cgroups, and all above them."""
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as file:
            lines = file.read().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has no controllers here. Version 1 has a folder for them, and often a link for each.
        for mount in {controllers, "cpu"} if controllers else ("", "unified"):
            top = os.path.join(root, "sys/fs/cgroup", mount)
            # In a container the path may be the host's, of which only the top is visible.
            names = [name for name in path.split("/") if name not in ("", "..")]
            for depth in range(len(names), -1, -1):
                yield os.path.join(top, *names[:depth])


def cpu_quota(directory):
    """(CPUs, directory) if this cgroup has a limit."""

    def read(name):
        with open(os.path.join(directory, name)) as file:
            return file.read()

    with contextlib.suppress(OSError, ValueError):
        quota, period = read("cpu.max").split()
        return None if quota == "max" else (int(quota) / int(period), directory)
    with contextlib.suppress(OSError, ValueError):
        quota = int(read("cpu.cfs_quota_us"))
        return (quota / int(read("cpu.cfs_period_us")), directory) if quota > 0 else None
    return None


def share_of_cores(mine, ranks):
    """The number of threads for a rank, of the cores that it and the other ranks of its host may use.

    mine: usable_cores() of the rank; ranks: those of all ranks of the host, itself included. A CPU that
    several ranks may use is divided between them; a rank that is pinned to CPUs of its own has them all.
    """
    sets = [set(rank["cpus"]) for rank in ranks]
    share = sum(1 / sum(cpu in cpus for cpus in sets) for cpu in mine["cpus"])
    if mine["quota"] is not None:
        sharers = sum(rank["quota_group"] == mine["quota_group"] for rank in ranks)
        share = min(share, mine["quota"] / sharers)
    return max(1, int(share + 1e-9))


def share_cores(environment, cores):
    """Sets the variables of THREAD_VARIABLES that are not set, in the environment of a rank.

    DAD_THREADS_PER_RANK, the user's wish, replaces what is set. DAD_CORE_SHARE tells the rank what was done.
    """
    if not environment.get("DAD_LOCAL_SIZE", "").isdecimal():
        return
    num_ranks = int(environment["DAD_LOCAL_SIZE"])
    wish = environment.get("DAD_THREADS_PER_RANK", "")
    threads = int(wish) if wish.isdecimal() else share_of_cores(cores, [cores] * num_ranks)
    if not wish and threads >= len(cores["cpus"]):
        return  # the whole machine: every library has its own default for that
    chosen = []
    for who, names in THREAD_VARIABLES.items():
        if wish or not any(environment.get(name) for name in names):
            environment.update(dict.fromkeys(names if wish else names[:1], str(threads)))
            chosen.append(who)
    environment["DAD_CORE_SHARE"] = json.dumps({"threads": threads, "for": chosen})


# ---- the secret of the job


def keep_secret(text):
    """PROCESS:DESCRIPTOR of memory that holds it, open in this process and inherited; "" if there is none."""
    if not text:
        return ""
    try:
        descriptor = os.memfd_create("dad_secret", 0)
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:  # it has no name, and nobody else can open it
            descriptor = os.dup(file.fileno())
    os.write(descriptor, SECRET_MARK + base64.b64decode(text))
    os.set_inheritable(descriptor, True)
    return f"{os.getpid()}:{descriptor}"


# ---- orders


def read_exactly(size):
    """Reads unbuffered: what follows must stay in the pipe for select."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            sys.exit("dadrun: the launcher went away before it said what to run")
        data += more
    return data


def read_spec():
    length = b""
    while not length.endswith(b"\n"):
        length += read_exactly(1)
    return json.loads(read_exactly(int(length)))


def borrow(spec):
    """Lets a process that already has the rank's libraries (elastic/nursery.py) fork the rank.

    Returns the exit code of the rank, or None if there is no such process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nursery:
        nursery.settimeout(5.0)
        try:
            nursery.connect("\0" + spec["nursery"])
            credentials = nursery.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] != os.geteuid():
                return None
            order = json.dumps(spec).encode()
            streams = array.array("i", [0, 1, 2])
            nursery.sendmsg(
                [struct.pack("!I", len(order))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
            )
            nursery.sendall(order)
            if nursery.recv(1) != b"+":
                return None
            nursery.sendall(b"!")
        except OSError:
            return None
        nursery.settimeout(None)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # the connection closes when we end
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        code = b""
        with contextlib.suppress(OSError):
            while not code.endswith(b"\n") and (more := nursery.recv(16)):
                code += more
        return int(code) if code else 128 + signal.SIGKILL


def main():
    spec = read_spec()
    silence_seconds = spec.get("silence_seconds", 0)
    code = borrow(spec) if spec.get("nursery") else None
    if code is None:
        code = Child(spec).run(silence_seconds)
    if silence_seconds and code == SSH_FAILED:
        os.write(2, b"dadrun: the command ended with exit code 255\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
