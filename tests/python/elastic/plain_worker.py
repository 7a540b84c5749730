"""A worker without a framework. It counts steps: each adds up the ranks' ones.

PLAN, a JSON object, says at which step it pauses until the test goes on ("pause"), or dies ("die": {"slot":
step}). What happens is printed; the test reads it.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from dad import basics, elastic
from dad._lib import _core
from dad.arguments import set_id
from dad.process_sets import ProcessSet

plan = json.loads(sys.argv[1])
slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
is_first_process = not Path(plan["folder"], slot).exists()
Path(plan["folder"], slot).touch()

pair = ProcessSet(plan["process_set"]) if "process_set" in plan else None
basics.init(process_sets=[pair] if pair else None)
print("START", slot, "rank", basics.rank(), flush=True)
weights = np.full(3, float(basics.rank()) if is_first_process else 1000.0)


class TellingState(elastic.ObjectState):
    def on_hosts_updated(self, timestamp, update_res):
        super().on_hosts_updated(timestamp, update_res)
        print("NEWS", update_res.name, flush=True)


state = TellingState(step=0, weights=weights, history=[])


def reset():
    print("RESET", basics.rank(), "of", basics.size(), "step", state.step, flush=True)
    if pair is not None:
        try:
            print("SET", set_id(pair), flush=True)
        except ValueError as error:
            print("SET", error, flush=True)


state.register_reset_callbacks([reset])


def hold(name):
    """Says that it is there, and goes on when the test says so; so ranks need no sleeps."""
    while not Path(plan["folder"], name).exists():
        time.sleep(0.02)


@elastic.run
def train(state):
    print("ROUND", basics.rank(), "of", basics.size(), "step", state.step, state.weights.tolist(), flush=True)
    while state.step < plan["steps"]:
        if is_first_process and plan.get("die", {}).get(slot) == state.step:
            print("DIE", flush=True)
            os._exit(3)
        if str(state.step) in plan.get("hold", {}):
            print("HOLD", state.step, flush=True)
            hold(plan["hold"][str(state.step)])
        ones = _core.gather_bytes("ones", b"1", 0)
        state.weights += len(ones)
        state.history.append(len(ones))
        state.step += 1
        state.commit()


train(state)
print("DONE", slot, basics.rank(), state.step, state.weights.tolist(), state.history, flush=True)
basics.shutdown()
