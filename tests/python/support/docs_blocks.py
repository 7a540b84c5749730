"""The code blocks of the documentation, and a way to run the fragments among them.

As a script (`docs_blocks.py torch` or `keras`) it runs the Python fragments of all pages on this rank.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.S | re.M)
SCRIPT = re.compile(r"# (\w+\.py): dadrun -np (\d) python \1")
NOT_RUN = {"CONTRIBUTING.md": "an extract of tests/python/planning/test_kinds.py"}

# What fragments take as given.
PREAMBLE = """
import torch
import dad
import dad.torch as hvd
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if not {wraps}:
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
loss = model(torch.randn(4, 8)).square().mean()
batch, epoch, handle, tensor = torch.randn(4, 8), 0, None, torch.ones(4)
"""
PREAMBLE_KERAS = """
import keras
import numpy as np
import dad.keras as hvd
hvd.init()
x, y = np.ones((16, 8), "float32"), np.ones((16, 2), "float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
if not {wraps}:
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
dataset = __import__("tensorflow").data.Dataset.from_tensor_slices((x, y)).batch(8)
"""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> list[Block]:
    found = []
    for page in pages():
        text = page.read_text()
        for match in BLOCK.finditer(text):
            indent, language, body = match.groups()
            body = re.sub(f"^{indent}", "", body, flags=re.M)
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, language, body))
    return found


def python_of(block: Block) -> str | None:
    """The Python in a block; of a diff, what it leads to."""
    if block.language == "diff":
        lines = block.text.splitlines()
        return "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return block.text if block.language == "python" else None


def fragments(framework: str) -> list[tuple[Block, str]]:
    """Those that are no complete scripts."""
    found = []
    for block in blocks():
        text = python_of(block)
        if text is None or SCRIPT.match(text) or block.page.name in NOT_RUN:
            continue
        if framework == ("keras" if re.search("[kK]eras|tensorflow", text) else "torch"):
            found.append((block, text))
    return found


def run(framework: str) -> None:
    preamble = PREAMBLE_KERAS if framework == "keras" else PREAMBLE
    for block, text in fragments(framework):
        names: dict[str, Any] = {"__name__": "__fragment__", "train": lambda steps: steps}
        wraps = "DistributedOptimizer" in text or "optim.Optimizer" in text
        print(f"running {block.where}", flush=True)
        exec(compile(preamble.format(wraps=wraps), f"preamble of {block.where}", "exec"), names)
        # Lines in a traceback are those of the page.
        exec(compile("\n" * block.line + text, str(block.page), "exec"), names)
    print(f"ran {len(fragments(framework))} fragments", flush=True)


if __name__ == "__main__":
    run(sys.argv[1])
