"""Starts workers of an elastic job that have imported their libraries already.

    python nursery.py NAME SCRIPT [ARGUMENT…]

It executes the import statements that SCRIPT begins with, up to the first other statement or import of a
module that is not known to bear it (LIBRARIES and the standard library), and waits at the abstract Unix
socket NAME. child.py of a worker connects, and passes its input, output and errors. The worker is a fork of
this process, which then executes SCRIPT from its beginning, as Python would: as __main__, with its own
environment, arguments and module search path. It finds the imported modules in sys.modules.

If anything of this does not work, child.py starts the worker in the usual way.
"""

import array
import ast
import contextlib
import importlib.util
import json
import os
import signal
import socket
import struct
import sys
import types

# They start no threads and open no devices at import. TensorFlow does not promise that.
LIBRARIES = frozenset({"dad", "horovod", "numpy", "torch", "torchvision"})
_MAX_SPEC_BYTES = 1 << 26


def leading_imports(source):
    """The leading import statements that may be executed in advance."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            break
        roots = {name.partition(".")[0] for name in names}
        if not all(root in LIBRARIES or root in sys.stdlib_module_names for root in roots):
            break
        if any(name.startswith(("dad.tensorflow", "dad.keras", "horovod.tensorflow")) for name in names):
            break
        found.append(node)
    return found


def preload(script):
    with open(script, "rb") as file:
        nodes = leading_imports(file.read())
    for node in nodes:
        code = compile(ast.Module([node], []), script, "exec", dont_inherit=True)
        exec(code, {"__name__": "__main__"})
    if "torch" in sys.modules:
        # The first optimizer imports it.
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")


class BornError(Exception):
    """Raised in a worker that has just been forked, to leave the nursery's code."""

    def __init__(self, environment):
        super().__init__()
        self.environment = environment


def load_child():
    """Loads child.py by its path: the package must not be imported before the script imports it."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "child.py")
    spec = importlib.util.spec_from_file_location("dad_runner_child", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def warm_child(child):
    class WarmChild(child.Child):
        """The parent of a worker. It ends with its connection to child.py, not with the nursery."""

        follows_parent = False

        def execute(self, _command, environment):
            raise BornError(environment)

    return WarmChild


def serve(name):
    child = load_child()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("\0" + name)
    server.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of workers
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(5.0)
            try:
                spec, descriptors = receive(connection)
            except (OSError, ValueError):
                continue
            if os.fork() == 0:
                server.close()
                care_for(child, connection, spec, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def receive(connection):
    """The order, and three descriptors. Raises ValueError, OSError."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.geteuid():
        raise ValueError("another user")
    numbers = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_LEN(3 * numbers.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    size = struct.unpack("!I", head)[0] if len(head) == 4 else 0
    body = b""
    while len(numbers) == 3 and size <= _MAX_SPEC_BYTES and len(body) < size:
        more = connection.recv(min(1 << 16, size - len(body)))
        if not more:
            break
        body += more
    if len(numbers) != 3 or len(body) < size or not body:
        for descriptor in numbers:
            os.close(descriptor)
        raise ValueError("not an order")
    return json.loads(body), list(numbers)


def care_for(child, connection, spec, descriptors):
    """In a fork: the parent of one worker, until it ends. In the worker, BornError leaves this function."""
    code = 127
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        # child.py may have lost patience, and started the worker itself.
        connection.sendall(b"+")
        if connection.recv(1) == b"!":
            connection.settimeout(None)
            worker = warm_child(child)(spec)
            worker.leash = connection.fileno()
            code = worker.run(spec.get("silence_seconds", 0))
            connection.sendall(b"%d\n" % code)
    except BornError:
        connection.close()
        raise
    except BaseException as error:
        os.write(2, f"dadrun: {type(error).__name__}: {error}\n".encode())
        os._exit(code)
    os._exit(code)


def become(environment):
    """Restores what a new interpreter would have found."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (numpy := sys.modules.get("numpy")) is not None:
        # Otherwise all workers of this host would draw the same numbers; random handles this by itself
        numpy.random.seed()
    threads = environment.get("OMP_NUM_THREADS", "")
    if (torch := sys.modules.get("torch")) is not None and threads.isdecimal():
        torch.set_num_threads(int(threads))


def show_without_us(kind, error, trace):
    trace = trace.tb_next if trace is not None else None
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    _name, sys.argv = sys.argv[1], sys.argv[2:]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    try:
        preload(sys.argv[0])
        serve(_name)
    except BornError as _born:
        become(_born.environment)
    with open(sys.argv[0], "rb") as _file:
        _code = compile(_file.read(), sys.argv[0], "exec", dont_inherit=True)
    _main = types.ModuleType("__main__")
    _main.__file__ = os.path.abspath(sys.argv[0])
    _main.__builtins__ = __builtins__
    sys.modules["__main__"] = _main
    sys.excepthook = show_without_us
    exec(_code, _main.__dict__)
