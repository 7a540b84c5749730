"""A worker of an elastic job without a framework: speaks the launcher's protocol, and says what it does.

    python tiny_worker.py [EVENT…]

It makes steps of 50 ms until there is a file "finish". EVENT is SLOT@STEP=WHAT or SLOT@STEP@N=WHAT: the worker
that was started first (or as the Nth) in this slot ("localhost:1") does WHAT at this step (0: before it asks
for its place): kill, stop, exit-CODE. It sees that a peer is gone by its process, and what the launcher has
told by its service.
"""

import base64
import io
import os
import pickle
import signal
import socketserver
import struct
import sys
import threading
import time
from hashlib import sha256
from hmac import digest

from dad.runner.kv import KeyValueClient, RoundOverError

HOST, SLOT = os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]
ME = f"{HOST}:{SLOT}"
STORE = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}".format(**os.environ)
store = KeyValueClient(STORE, request_timeout=60.0)
FOLDER = os.environ["TINY_FOLDER"]
KEY = os.urandom(32)
STEP_SECONDS = 0.05
news = []


def ask():
    return tuple(int(part) for part in store.get("rank_and_size", ME).split(b","))


class Any_:
    def __init__(self, *args):
        self.args = args

    def __setstate__(self, state):
        self.__dict__.update(state)


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        assert module.startswith("horovod.runner."), module
        return type(name, (Any_,), {})


class Service(socketserver.StreamRequestHandler):
    """Horovod's notification service."""

    def handle(self):
        head = self.rfile.read(36)
        body = self.rfile.read(struct.unpack("i", head[32:])[0])
        assert digest(KEY, body, sha256) == head[:32]
        asked = Reader(io.BytesIO(body)).load()
        name = type(asked).__name__
        if name == "HostsUpdatedRequest":
            assert isinstance(asked.timestamp, int)
            news.append(asked.res.args[0])
        module = b"chorovod.runner.common.util.network\n"
        reply = {"PingRequest": b"PingResponse", "HostsUpdatedRequest": b"AckResponse"}[name]
        body = b"\x80\x02" + module + reply + b"\n)\x81."
        self.wfile.write(digest(KEY, body, sha256) + struct.pack("i", len(body)) + body)


def serve():
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    packet = pickle.dumps(({"lo": [server.server_address]}, KEY))
    store.put("worker_addresses", ME, base64.b64encode(packet))


def say(*what):
    print(ME, *what, flush=True)


def incarnation():
    """How often a worker was started in this slot, with this one."""
    count = 1
    while True:
        try:
            os.close(os.open(f"{FOLDER}/started.{ME}.{count}", os.O_CREAT | os.O_EXCL))
            return count
        except FileExistsError:
            count += 1


def do(what):
    say("does", what)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what.startswith("exit"):
        os._exit(int(what.split("-")[1]))


def meet(place):
    """The processes of this round, through the store, as real workers do. None: the round is over."""
    rank, size = place[:2]
    store.put("tiny", str(rank), str(os.getpid()).encode())
    found = []
    while len(found) < size:
        try:
            peer = store.get("tiny", str(len(found)))
        except RoundOverError:
            return None
        if peer is None:
            time.sleep(0.01)
        else:
            found.append(int(peer))
    return found


def join():
    """Takes part in rounds until one has begun; its processes."""
    while True:
        place = ask()
        say("place", *place)
        if place[0] < 0:
            sys.exit(0)
        if others := meet(place):
            say("meets", place[1])
            return others
        say("round is over")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main():
    mine = {}
    number = incarnation()
    for event in [text for text in sys.argv[1:] if "=" in text]:
        who, _, what = event.partition("=")
        slot, at, *which = who.split("@")
        if slot == ME and int(which[0] if which else 1) == number:
            mine[int(at)] = what
    say(
        "starts",
        os.environ["HOROVOD_RANK"],
        os.environ["HOROVOD_ELASTIC"],
        os.environ.get("HOROVOD_SIZE"),
        os.getpid(),
    )
    if 0 in mine:
        do(mine[0])
    others = join()
    serve()
    done = 0
    while not is_finished():
        lost = not all(is_alive(pid) for pid in others)
        if (lost or news or is_over()) and not is_finished():
            say("lost a peer" if lost else f"told {news}")
            if news and not lost:
                store.put("tiny", "over", b"1")  # rank 0 tells the others
            news.clear()
            others = join()
        time.sleep(STEP_SECONDS)
        done += 1
        if done in mine:
            do(mine[done])


def is_over():
    """Whether rank 0 has said so."""
    try:
        return store.get("tiny", "over") is not None
    except RoundOverError:
        return False


def is_finished():
    return os.path.exists(f"{FOLDER}/finish")


main()
