"""model.fit() of Keras 3 on several processes: dadrun -np 2 python examples/keras_fit.py

A script for Horovod differs in one line:

    -import horovod.keras as hvd
    +import dad.keras as hvd

With KERAS_BACKEND=torch it trains on torch instead of TensorFlow.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from idx_files import fashion_mnist

import dad.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--images", type=int, default=60000, help="to train on, of all ranks")
parser.add_argument("--compression", help="a method: auto, exact, rank_dad:rank=4, …; default: dense")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())

images, labels = fashion_mnist("train", hvd.rank(), hvd.size())
model = keras.Sequential(
    [
        keras.Input((28, 28)),
        keras.layers.Reshape((28, 28, 1)),
        keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
rate = 0.001 * hvd.size()
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(rate), compression=args.compression),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(
    images,
    labels,
    batch_size=128,
    # The same number of steps everywhere, also when the shares differ by an image.
    steps_per_epoch=args.images // hvd.size() // 128,
    epochs=args.epochs,
    verbose=2,  # of rank 0 only
    validation_data=fashion_mnist("t10k", hvd.rank(), hvd.size()),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=1),
        hvd.callbacks.CompressionReport(),
    ],
)
