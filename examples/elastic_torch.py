"""A training job that goes on when ranks are lost, and takes in new ones:

dadrun -np 3 --min-np 2 python examples/elastic_torch.py

Kill one of its processes while it runs, and watch: the others go on from the last commit within a second or
two, and the new process in its place joins them when it is ready.
"""

import argparse

import torch

import dad.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--samples", type=int, default=20000)
arguments = parser.parse_args()

# What comes before train() runs on each rank when it starts, also on one that joins later: it makes the same
# things on every rank, and calls no collectives.
hvd.init()
torch.manual_seed(0)
inputs = torch.randn(arguments.samples, 32)
labels = (inputs @ torch.randn(32, 10)).argmax(1)
dataset = torch.utils.data.TensorDataset(inputs, labels)

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=64, sampler=sampler)


@hvd.elastic.run
def train(state):
    """Called again whenever ranks have come or gone, with the state of the last commit on all of them."""
    print(f"rank {hvd.rank()} of {hvd.size()}: epoch {state.epoch}, batch {state.batch}", flush=True)
    while state.epoch < arguments.epochs:
        loss = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            sampler.record_batch(state.batch, len(x))
            state.batch += 1
            if state.batch % 10 == 0:
                state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {loss.item():.3f} on rank 0, {hvd.size()} ranks", flush=True)
        state.epoch += 1
        state.batch = 0
        sampler.set_epoch(state.epoch)
        state.commit()


train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0))
