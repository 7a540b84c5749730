"""A rank of the storm: a small linear model, without a framework, until there is a file FOLDER/finish.

    python storm_worker.py FOLDER STEP_SECONDS

It writes what it has done to FOLDER/log.HOST:SLOT, a line of JSON each, by the clock that all processes of the
machine share: that it is ready to join, and each step that the ranks have committed, with their number.
"""

import hashlib
import json
import os
import sys
import time

import numpy as np

from dad import basics, elastic
from dad._lib import _core

FOLDER, STEP_SECONDS = sys.argv[1], float(sys.argv[2])
SLOT = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
SAMPLES, FEATURES = 16, 256
TRUTH = np.random.default_rng(0).normal(size=FEATURES)
log = open(f"{FOLDER}/log.{SLOT}", "a", buffering=1)  # noqa: SIM115  until the process ends


def say(event, **what):
    log.write(json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **what}) + "\n")


def mean_gradient(weights, step):
    """The same bits on all ranks: each adds up in rank order."""
    x = np.random.default_rng([step, basics.rank()]).normal(size=(SAMPLES, FEATURES))
    mine = x.T @ (x @ (weights - TRUTH)) / SAMPLES
    gathered = _core.gather_bytes("gradient", mine.tobytes(), 0)
    return sum(np.frombuffer(one) for one in gathered) / len(gathered)


def loss_of(weights):
    return float(np.square(weights - TRUTH).mean())


say("ready")
basics.init()
state = elastic.ObjectState(step=0, weights=np.zeros(FEATURES), is_over=False)


@elastic.run
def train(state):
    say("round", size=basics.size(), step=state.step)
    while not state.is_over:
        time.sleep(STEP_SECONDS)
        state.weights = state.weights - 0.02 * mean_gradient(state.weights, state.step)
        over = _core.gather_bytes("over", b"1" if os.path.exists(f"{FOLDER}/finish") else b"", 0)
        state.is_over = any(over)
        state.step += 1
        state.save()
        say("step", step=state.step, size=basics.size())
        state.check_host_updates()


train(state)
digest = hashlib.sha256(state.weights.tobytes()).hexdigest()[:16]
print(
    f"result {basics.rank()} {basics.size()} {state.step} {digest} {loss_of(state.weights):.6f}", flush=True
)
basics.shutdown()
