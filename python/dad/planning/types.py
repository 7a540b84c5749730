"""What the planner works on: what ranks saw of their tensors, and the choices it makes. What things cost
is in costs.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dad.methods import compression as _methods
from dad.methods.kinds import KINDS, Kind
from dad.planning.costs import DIRECT_BYTES, Costs

ANY_ROWS = 2**62


@dataclass(frozen=True)
class Link:
    """The layer above, and what stands between."""

    upper: str
    activation: str
    slope: float = 0.0

    def mark(self) -> str:
        return f"leaky_relu={self.slope!r}" if self.activation == "leaky_relu" else self.activation


@dataclass(frozen=True)
class Observation:
    """What one rank observed of one tensor in a step."""

    rows: int = 0
    indexed_rows: int = 0
    samples: int = 0
    row_bytes: int = 0  # of one value of A and D: 2 under autocast
    dense: bool = False  # some or all of its gradient came formed
    sparse: bool = False
    used: bool = True
    bias: str | None = None  # the tensor that travels with it
    link: Link | None = None
    reason: str = ""  # why not (only) as rows
    sums: bool = False  # rows of a vector are its gradients of samples: a norm's
    row_outputs: int = 0  # values of D in a row, of one group of a convolution; 0: all outputs
    passes: int = 1  # backward passes of a step
    too_large: bool = False  # a sparse form was larger than dense

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Observation:
        """An observation from the dataclasses.asdict() of another rank."""
        link = fields["link"]
        return Observation(**{**fields, "link": Link(**link) if link is not None else None})


@dataclass(frozen=True)
class Layer:
    """One tensor as a matrix, with what all ranks observed of it."""

    name: str
    out: int
    columns: int  # without the bias
    element_bytes: int
    floating: bool
    method: _methods.Method
    seen: tuple[Observation, ...]  # by rank
    strength: int = 0  # how often auto sent too little of it (guard.py)
    raised: str = ""  # why, for the plan

    @cached_property
    def bias(self) -> str | None:
        names = {s.bias for s in self.seen if s.rows}
        return names.pop() if len(names) == 1 else None

    @cached_property
    def link(self) -> Link | None:
        """True only if every rank that has rows saw it."""
        links = {s.link for s in self.seen if s.rows}
        return links.pop() if len(links) == 1 else None

    @cached_property
    def used(self) -> bool:
        return any(s.used for s in self.seen)

    @cached_property
    def dense(self) -> bool:
        return any(s.dense for s in self.seen) or not any(s.rows or s.indexed_rows for s in self.seen)

    @cached_property
    def sparse(self) -> bool:
        return any(s.sparse for s in self.seen)

    @cached_property
    def too_large(self) -> bool:
        return any(s.too_large for s in self.seen)

    @cached_property
    def rows(self) -> int:
        return max((s.rows + s.indexed_rows for s in self.seen), default=0)

    @cached_property
    def row_outputs(self) -> int:
        """The largest number of values that a row of D has on any rank."""
        return max((s.row_outputs or self.out for s in self.seen if s.rows), default=self.out)

    @cached_property
    def all_rows(self) -> int:
        return sum(s.rows + s.indexed_rows for s in self.seen)

    @cached_property
    def reason(self) -> str:
        """Why it is dense."""
        part = "a part of its" if any(s.rows or s.indexed_rows for s in self.seen) else "its"
        otherwise = f"{part} gradient came from an op without factors"
        return next((s.reason for s in self.seen if s.reason), otherwise)

    @cached_property
    def elements(self) -> int:
        return self.out * (self.columns + (self.bias is not None))

    def row_bits(self, wire: str) -> int:
        """Bits of a value of A or D: fp32 leaves it as it is."""
        bits = 8 * max((s.row_bytes for s in self.seen), default=0) or 8 * self.element_bytes
        return min(bits, 16) if wire == "bf16" else bits

    def text(self, *marks: str) -> str:
        words = [f"{self.out}x{self.columns}", *(["bias"] if self.bias is not None else []), *marks]
        return "layer=" + ":".join(words)


@dataclass(frozen=True)
class Choice:
    """The layers that travel as one request. `layers` are names, of a chain from the lowest to the top.

    Raises ValueError if its kind has no row in kinds.py, because no framework would know how to send it."""

    kind: str  # a row of kinds.py
    layers: tuple[str, ...]
    biases: tuple[str | None, ...]
    text: str  # the method, for the core
    why: str
    num_bytes: float  # predicted, sent by one rank in a step
    flops: float = 0.0  # beyond what the framework does anyway
    memory: float = 0.0  # bytes read and written, likewise
    rounds: int = 1  # of messages, one after the other
    seconds: float = 0.0  # by itself, without delays
    passes: tuple[bool, ...] = (False,)  # chain: its own gradient goes another way
    capture: str = "off"  # how the layers are captured from now on: a mode of torch_ops/capture/capture.h
    rows: int = 0
    most_rows: int = ANY_ROWS  # a rank with more rows asks for a new plan
    fallback: bool = False  # the requested method does not fit
    sparse: bool = False  # its gradient comes as torch's sparse tensor
    label: str = ""  # the user's name for the method, if kind and text do not tell it

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f'"{self.layers[0]}": its plan has the kind {self.kind!r}, which this version of dad does '
                f"not have; there are {', '.join(KINDS)}"
            )

    @property
    def row(self) -> Kind:
        return KINDS[self.kind]

    def option(self, key: str) -> str:
        """An option of the method's text."""
        words = (word.partition("=") for word in self.text.split(";"))
        return next((value for name, _, value in words if name == key), "")

    def own(self) -> list[tuple[str, str | None]]:
        """(weight, bias) of the layers whose gradients this is."""
        triples = zip(self.layers, self.biases, self.passes, strict=True)
        return [(weight, bias) for weight, bias, passes in triples if not passes]


@dataclass
class Plan:
    choices: list[Choice] = field(default_factory=list)
    size: int = 1
    # By how much a step is predicted to lengthen compared with no communication; None: nothing was measured.
    exposed_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Numbers and strings only, for a checkpoint."""
        return {
            "size": self.size,
            "exposed_seconds": self.exposed_seconds,
            "choices": [dataclasses.asdict(choice) for choice in self.choices],
        }

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> Plan:
        lists = ("layers", "biases", "passes")
        choices = [{**choice, **{key: tuple(choice[key]) for key in lists}} for choice in saved["choices"]]
        return Plan([Choice(**choice) for choice in choices], saved["size"], saved.get("exposed_seconds"))


def dense_choice(layer: Layer, costs: Costs, why: str, fallback: bool = False) -> Choice:
    size = layer.out * layer.columns * layer.element_bytes
    num_bytes = 2 * (costs.size - 1) / costs.size * size
    return Choice(
        kind="dense",
        layers=(layer.name,),
        biases=(None,),
        text="none",
        why=why,
        num_bytes=num_bytes,
        rounds=1 if size <= DIRECT_BYTES else 2,
        seconds=costs.seconds(num_bytes, 0.0),
        rows=layer.rows,
        fallback=fallback,
    )
