"""How gradients are sent: one frozen dataclass per method, and one parser for the command
line (dadrun --compression), the environment (DAD_COMPRESSION) and per_layer.

A spec is `method` or `method:option=value,option=value`; for per_layer it is
`per_layer:glob=spec;glob=spec`. A call as in Python, `method(value, option=value)`, means the same.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dad.suggest import nearest

_METHODS: dict[str, type[Method]] = {}
_QSGD_BUCKET = 512  # elements with one scale


@dataclass(frozen=True)
class Method:
    """Base of all methods. `Compression.x` and `Compression.x()` mean the same."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A framework's own class for a method takes its name but not its place in the table.
        if "name" in cls.__dict__:
            _METHODS.setdefault(cls.name, cls)

    def __new__(cls, *values: Any, **options: Any) -> Method:
        # Before the dataclass sees them: an option that does not exist is a bad option like any other.
        for option, value in options.items():
            cls._require_option(option, value)
        return super().__new__(cls)

    @classmethod
    def _require_option(cls, option: str, value: Any) -> None:
        known = [field.name for field in dataclasses.fields(cls)]
        if option not in known:
            has = f"its options: {', '.join(known)}" if known else "it has none"
            hint = nearest(option, known)
            raise ValueError(f"compression {cls.name}: there is no option {option}={value!r}{hint}; {has}")

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        """ValueError if an option is out of range."""

    def spec(self) -> str:
        """The spec that parse() turns into an equal method: options that differ from their defaults."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (":" + ",".join(changed) if changed else "")

    def _fail(self, option: str, expected: str) -> typing.NoReturn:
        raise ValueError(
            f"compression {self.name}: {option}={getattr(self, option)!r} is not possible; {expected}"
        )

    def _one_of(self, option: str, *choices: str) -> None:
        value = getattr(self, option)
        if value not in choices:
            self._fail(option, "one of " + ", ".join(choices) + nearest(str(value), choices))

    def _integer(self, option: str, low: int, high: int | None = None) -> None:
        value = getattr(self, option)
        integer = isinstance(value, int) and not isinstance(value, bool)
        if not integer or value < low or (high is not None and value > high):
            self._fail(option, f"an integer from {low}" + (f" to {high}" if high is not None else " up"))

    def _real(
        self,
        option: str,
        low: float,
        high: float = float("inf"),
        optional: bool = False,
        above: bool = False,  # low itself is not possible
    ) -> None:
        value = getattr(self, option)
        if optional and value is None:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or (above and value == low):
            first = f"above {low}" if above else f"from {low}"
            self._fail(option, f"a number {first} to {high}" + (" or None" if optional else ""))

    def _flag(self, option: str) -> None:
        if not isinstance(getattr(self, option), bool):
            self._fail(option, "True or False")


@dataclass(frozen=True)
class NoCompression(Method):
    """Dense allreduce."""

    name = "none"


@dataclass(frozen=True)
class Fp16(Method):
    """Dense allreduce of gradients cast to float16."""

    name = "fp16"


@dataclass(frozen=True)
class Bf16(Method):
    """Dense allreduce of gradients cast to bfloat16."""

    name = "bf16"


@dataclass(frozen=True)
class Dad(Method):
    """Exact factors instead of the gradient."""

    name = "dad"
    wire: str = "fp32"  # or bf16

    def _check(self) -> None:
        self._one_of("wire", "fp32", "bf16")


@dataclass(frozen=True)
class Edad(Dad):
    """Exact factors; lower deltas are recomputed where that is provably the same."""

    name = "edad"


@dataclass(frozen=True)
class Lossy(Method):
    """Base of the methods that change the gradient."""

    warmup_steps: int = dataclasses.field(default=0, kw_only=True)  # that many dense steps first

    def _check(self) -> None:
        self._integer("warmup_steps", 0)


@dataclass(frozen=True)
class Quantiser(Lossy):
    """Base of the methods that compress any tensor as it is. All that a new one needs in Python is its class,
    with these two, and a row in kinds.py."""

    def core_text(self, seed: int) -> str:
        """The method for the core; `seed` is that of the job."""
        raise NotImplementedError

    def bytes_sent(self, elements: int, size: int) -> float:
        """By one of `size` ranks in a step."""
        raise NotImplementedError


@dataclass(frozen=True)
class RankDad(Lossy):
    """A low-rank gradient from the factors."""

    name = "rank_dad"
    rank: int = 4
    tol: float = 0.0  # stop early when a direction adds less than this share
    energy: float | None = None  # choose the rank that keeps this share of the energy
    iterations: int = 1
    combine: str = "auto"  # gather, owner, power
    wire: str = "int4"  # fp32, bf16, int8
    error_feedback: bool = True
    residual: str = "dense"  # or rows
    rest: str = "int8"  # or none: for tensors without factors

    def _check(self) -> None:
        super()._check()
        self._integer("rank", 1, 255)
        self._real("tol", 0.0, 1.0)
        self._real("energy", 0.0, 1.0, optional=True)
        self._integer("iterations", 1, 100)
        self._one_of("combine", "auto", "gather", "owner", "power")
        self._one_of("wire", "fp32", "bf16", "int8", "int4")
        self._flag("error_feedback")
        self._one_of("residual", "dense", "rows")
        self._one_of("rest", "int8", "none")
        if self.combine == "power" and self.residual == "rows":
            self._fail("residual", "combine=power keeps a dense one")


@dataclass(frozen=True)
class Vgc(Lossy):
    """Sends the elements whose mean beats their variance."""

    name = "vgc"
    alpha: float = 1.0  # the mean squared has to be so many times the variance
    zeta: float = 0.999  # the variance of what was not sent fades by this factor per step
    variance: str = "auto"  # over rows of the factors (row), or over samples (sample)
    coding: str = "rice"  # or word
    error_feedback: bool = False  # True: what rounding to a power of two leaves is kept

    def _check(self) -> None:
        super()._check()
        _check_variance(self)
        self._flag("error_feedback")


@dataclass(frozen=True)
class VgcStrom(Lossy):
    """vgc, and only what passes the threshold tau."""

    name = "vgc_strom"
    alpha: float = 1.0
    zeta: float = 0.999
    variance: str = "auto"
    coding: str = "rice"
    tau: float = 4.0  # times the root mean square of this rank's gradient of the tensor
    tau_absolute: float | None = None  # in units of the gradient instead, as in the paper

    def _check(self) -> None:
        super()._check()
        _check_variance(self)
        _check_threshold(self)


@dataclass(frozen=True)
class Strom(Lossy):
    """Sends the elements that pass the threshold tau."""

    name = "strom"
    tau: float = 4.0  # as in vgc_strom
    tau_absolute: float | None = None
    coding: str = "rice"

    def _check(self) -> None:
        super()._check()
        _check_threshold(self)
        self._one_of("coding", "rice", "word")


@dataclass(frozen=True)
class Int8(Quantiser):
    """Quantised to 8 bits with a scale per bucket."""

    name = "int8"
    bucket: int = 512
    error_feedback: bool = True

    def _check(self) -> None:
        super()._check()
        self._integer("bucket", 1)
        self._flag("error_feedback")

    def core_text(self, seed: int) -> str:
        return f"int8;bucket={self.bucket};feedback={int(self.error_feedback)}"

    def bytes_sent(self, elements: int, size: int) -> float:
        buckets = -(-elements // self.bucket)
        return 2 * (size - 1) / size * (elements + 4 * buckets + size)


@dataclass(frozen=True)
class TopK(Lossy):
    """Sends the largest elements."""

    name = "topk"
    ratio: float = 0.01  # of the elements that are sent
    error_feedback: bool = True

    def _check(self) -> None:
        super()._check()
        self._real("ratio", 0.0, 1.0, above=True)
        self._flag("error_feedback")


@dataclass(frozen=True)
class ChunkTopK(Lossy):
    """Sends the largest elements of each chunk of a tensor, in few bits each."""

    name = "chunk_topk"
    chunk: int = 4096  # elements, in memory order
    k: int = 64  # that are sent of each chunk
    bits: int = 2  # of an element: a sign, and the number of its level
    decay: float = 1.0  # what waits fades by this factor per step
    combine: str = "auto"  # gather, owner
    on: str = "gradient"  # or momentum: what waits is the momentum, applied by plain SGD or by sign

    def _check(self) -> None:
        super()._check()
        self._integer("chunk", 1, 2**24)
        self._integer("k", 1, self.chunk)
        self._integer("bits", 1, 8)
        self._real("decay", 0.0, 1.0)
        self._one_of("combine", "auto", "gather", "owner")
        self._one_of("on", "gradient", "momentum")


@dataclass(frozen=True)
class Qsgd(Quantiser):
    """Random rounding to few levels."""

    name = "qsgd"
    bits: int = 4  # per element

    def _check(self) -> None:
        super()._check()
        self._integer("bits", 1, 8)

    def core_text(self, seed: int) -> str:
        return f"qsgd;bits={self.bits};seed={seed}"

    def bytes_sent(self, elements: int, size: int) -> float:
        share = 1 + 4 * -(-elements // _QSGD_BUCKET) + -(-elements * self.bits // 8)
        return float((size - 1) * share)


@dataclass(frozen=True)
class PowerSgd(Lossy):
    """A low-rank gradient from the dense one."""

    name = "powersgd"
    rank: int = 4
    error_feedback: bool = True

    def _check(self) -> None:
        super()._check()
        self._integer("rank", 1, 255)
        self._flag("error_feedback")


@dataclass(frozen=True)
class Exact(Method):
    """The planner chooses among none, dad and edad."""

    name = "exact"


@dataclass(frozen=True)
class Auto(Lossy):
    """The planner chooses among all methods."""

    name = "auto"
    budget: int | None = None  # bytes per step

    def _check(self) -> None:
        super()._check()
        if self.budget is not None:
            self._integer("budget", 1)


@dataclass(frozen=True)
class PerLayer(Method):
    """A method for each tensor: the first glob that matches its name wins."""

    name = "per_layer"
    methods: Mapping[str, Any]  # glob -> method

    def _check(self) -> None:
        if not isinstance(self.methods, Mapping) or not self.methods:
            self._fail("methods", "a mapping from glob to method with at least one entry")
        resolved = {glob: resolve(method) for glob, method in self.methods.items()}
        if any(isinstance(method, PerLayer) for method in resolved.values()):
            self._fail("methods", "methods other than per_layer")
        object.__setattr__(self, "methods", types.MappingProxyType(resolved))

    def method_for(self, tensor_name: str) -> Any:
        for glob, method in self.methods.items():
            if fnmatch.fnmatchcase(tensor_name, glob):
                return method
        return NoCompression()

    def spec(self) -> str:
        return "per_layer:" + ";".join(f"{glob}={method.spec()}" for glob, method in self.methods.items())


def _check_variance(method: Vgc | VgcStrom) -> None:
    method._real("alpha", 0.0)
    method._real("zeta", 0.0, 1.0)
    method._one_of("variance", "auto", "row", "sample")
    method._one_of("coding", "rice", "word")


def _check_threshold(method: Strom | VgcStrom) -> None:
    for option, optional in (("tau", False), ("tau_absolute", True)):
        method._real(option, 0.0, optional=optional, above=True)


class Compression:
    """The methods by which gradients can be sent, as attributes.

    Everything that takes `compression=` also takes the name, such as "auto" or "rank_dad:rank=8".
    docs/methods.md describes the methods and their options.

    Example::

        hvd.Compression.auto
        hvd.Compression.rank_dad(rank=8)
        hvd.Compression.per_layer({"fc*.weight": "rank_dad", "*": "none"})
    """

    none = NoCompression
    fp16 = Fp16
    bf16 = Bf16
    dad = Dad
    edad = Edad
    rank_dad = RankDad
    vgc = Vgc
    vgc_strom = VgcStrom
    strom = Strom
    int8 = Int8
    topk = TopK
    chunk_topk = ChunkTopK
    qsgd = Qsgd
    powersgd = PowerSgd
    exact = Exact
    auto = Auto
    per_layer = PerLayer


def resolve(compression: Any) -> Any:
    """A method from a method, its class or a spec. Other objects must have compress and decompress,
    as Horovod's compressors do, and come back as they are."""
    if isinstance(compression, str):
        return parse(compression)
    if isinstance(compression, type) and issubclass(compression, Method):
        return compression()
    if isinstance(compression, Method):
        return compression
    if all(callable(getattr(compression, method, None)) for method in ("compress", "decompress")):
        return compression
    raise ValueError(
        f"compression={compression!r} is neither a method of Compression nor a class "
        "with compress(tensor) and decompress(tensor, ctx)"
    )


def from_environment() -> Method:
    """The method for a script that names none."""
    return parse(os.environ.get("DAD_COMPRESSION") or "none")


def seed_from_environment() -> int:
    """DAD_SEED: of what qsgd rounds at random. The same on all ranks."""
    text = os.environ.get("DAD_SEED") or "0"
    if not text.isdecimal() or int(text) >= 2**63:
        raise ValueError(f"DAD_SEED={text!r} is not possible; an integer from 0 to 2^63 - 1")
    return int(text)


def parse(spec: str) -> Method:
    """The method of a spec such as `rank_dad:rank=4,wire=int4` or `rank_dad(4, wire="int4")`."""
    if re.fullmatch(r"[\w.]+\s*\(.*\)", spec.strip(), re.DOTALL):
        return _from_call(spec)
    name, _, rest = spec.strip().partition(":")
    method = _named(spec, name)
    if name == "per_layer":
        return PerLayer({glob: parse(inner) for glob, inner in _pairs(spec, rest, ";")})
    fields = _option_types(method)
    options = {}
    for option, text in _pairs(spec, rest, ","):
        method._require_option(option, text)
        options[option] = _value(text, fields[option])
    return method(**options)


def _named(spec: str, name: str) -> type[Method]:
    if name not in _METHODS:
        hint = nearest(name, _METHODS)
        raise ValueError(f"compression {spec!r}: no method {name!r}{hint}; there are {', '.join(_METHODS)}")
    return _METHODS[name]


def _option_types(method: type[Method]) -> dict[str, Any]:
    """By name, in the order in which they may be given."""
    annotations = typing.get_type_hints(method)
    fields = sorted(dataclasses.fields(method), key=lambda field: bool(field.kw_only))
    return {field.name: annotations[field.name] for field in fields}


def _from_call(spec: str) -> Method:
    """The spec is what a script would write: a call, its arguments constants, names of methods or calls."""
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"compression {spec!r}: {error.msg}; expected METHOD(option=value, …)") from None
    return _method_of(spec, node)


def _method_of(spec: str, node: ast.expr) -> Method:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return parse(node.value)
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    # Compression.rank_dad means the same as rank_dad.
    name = ast.unparse(call.func).rpartition(".")[2]
    method = _named(spec, name)
    if name == "per_layer" and call.args and isinstance(call.args[0], ast.Dict):
        globs = [ast.literal_eval(glob) for glob in call.args[0].keys if glob is not None]
        methods = [_method_of(spec, inner) for inner in call.args[0].values]
        return PerLayer(dict(zip(globs, methods, strict=True)))
    fields = _option_types(method)
    if len(call.args) > len(fields):
        raise ValueError(f"compression {spec!r}: {name} takes at most {len(fields)} options")
    options = dict(zip(fields, call.args, strict=False))
    for keyword in call.keywords:
        method._require_option(keyword.arg or "**", ast.unparse(keyword.value))
        options[str(keyword.arg)] = keyword.value
    return method(**{option: _constant(spec, value, fields[option]) for option, value in options.items()})


def _constant(spec: str, node: ast.expr, annotation: Any) -> Any:
    if isinstance(node, ast.Name):  # a shell eats the quotes of wire="int8"
        return _value(node.id, annotation)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"compression {spec!r}: {ast.unparse(node)} is not a constant") from None


def _pairs(spec: str, rest: str, separator: str) -> list[tuple[str, str]]:
    pairs = []
    for part in filter(None, (piece.strip() for piece in rest.split(separator))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"compression {spec!r}: {part!r} should be key=value")
        pairs.append((key.strip(), value.strip()))
    return pairs


def _value(text: str, annotation: Any) -> Any:
    """`text` as the type of its field where it reads as one; what remains text is refused by the range
    check, which names the option."""
    kinds = typing.get_args(annotation) or (annotation,)
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text
