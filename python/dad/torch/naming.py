"""Names and groups of an optimizer's parameters, which all ranks must agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

Named = list[tuple[str, torch.Tensor]]


def name_parameters(
    param_groups: Sequence[dict[str, Any]],
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    prefix: str,
) -> Named:
    """(name, parameter) for all of an optimizer's parameters, in its order."""
    if named_parameters is None:
        return [
            (f"{prefix}.{i}.{j}", param)
            for i, group in enumerate(param_groups)
            for j, param in enumerate(group["params"])
        ]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ValueError("named_parameters is a list of (name, parameter), as model.named_parameters() gives")
    duplicates = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if duplicates:
        raise ValueError(f"named_parameters has names that are not unique: {', '.join(duplicates)}")
    names = {param: name for name, param in named}
    nameless = [
        f"group {i}, parameter {j}, shape {list(param.shape)}"
        for i, group in enumerate(param_groups)
        for j, param in enumerate(group["params"])
        if param not in names
    ]
    if nameless:
        raise ValueError(f"named_parameters misses parameters of the optimizer: {'; '.join(nameless)}")
    return [(names[param], param) for group in param_groups for param in group["params"]]


def new_names(
    params: Sequence[torch.Tensor], model: torch.nn.Module | None, stream: int, group_number: int
) -> Named:
    """Names for a parameter group that was added later."""
    known = {param: name for name, param in model.named_parameters()} if model is not None else {}
    return [(known.get(p, f"allreduce.noname.{stream}.{group_number}.{j}"), p) for j, p in enumerate(params)]


def split_groups(
    params: list[torch.Tensor], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    """The parameters that travel together: `groups` runs of about equal length, or the lists given."""
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups={groups} is not possible; 1 or more, or lists of parameters")
        short, longer = divmod(len(params), groups)
        ends = [0]
        for i in range(min(groups, len(params))):
            ends.append(ends[-1] + short + (i < longer))
        return [params[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    if not isinstance(groups, list | tuple) or any(not isinstance(group, list | tuple) for group in groups):
        raise ValueError("groups is a number or a list of lists of parameters")
    members = [param for group in groups for param in group]
    if any(not isinstance(param, torch.Tensor) for param in members):
        raise ValueError("groups has members that are not parameters")
    if len(set(map(id, members))) != len(members):
        raise ValueError("groups has a parameter more than once")
    return [list(group) for group in groups]


def describe(param: torch.Tensor) -> str:
    """What ranks must have in common of a parameter, as text."""
    shape = "of no shape yet" if is_lazy(param) else str(tuple(param.shape))
    dtype = str(param.dtype).removeprefix("torch.")
    return f"{shape} {dtype}" if param.requires_grad else f"{shape} {dtype}, frozen"
