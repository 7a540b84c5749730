"""A worker that trains a model of Keras with fit(), on the backend of KERAS_BACKEND."""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

import dad.keras as hvd

plan = json.loads(sys.argv[1])
slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
is_first_process = not Path(plan["folder"], slot).exists()
Path(plan["folder"], slot).touch()
EPOCHS, STEPS, BATCH = 3, 6, 8

hvd.init()
keras.utils.set_random_seed(3 if is_first_process else 77)
model = keras.Sequential(
    [keras.Input((20,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(4)]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression="int8")
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
generator = np.random.default_rng(0)
x = generator.normal(size=(BATCH * STEPS, 20)).astype("float32")
y = (x[:, :4]).argmax(1)

state = hvd.elastic.KerasState(model, batch=0, epoch=0, commits=0)


class Die(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if is_first_process and plan["die"].get(slot) == [state.epoch, batch]:
            os._exit(3)


class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        state.commits += 1


@hvd.elastic.run
def train(state):
    print("ROUND", hvd.rank(), "of", hvd.size(), "epoch", state.epoch, "batch", state.batch, flush=True)
    if state.epoch < EPOCHS:
        model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=EPOCHS - state.epoch,
            shuffle=False,
            verbose=0,
            callbacks=[
                Die(),
                Count(),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            ],
        )


train(state)
weights = [float(np.abs(np.asarray(w.numpy())).sum()) for w in model.weights]
print("DONE", hvd.rank(), hvd.size(), state.epoch, int(optimizer.iterations.numpy()), weights, flush=True)
hvd.shutdown()
