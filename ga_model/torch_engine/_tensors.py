"""The tensors that a model keeps besides its variables, and those that are written past PyTorch.

They are the buffers of PyTorch modules, and tensors in attributes of layers of the user's own. What
a write through `.data` changes, no count of PyTorch tells, so values are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ga_model.base._internals import layers_in, raw
from ga_model.base._internals_torch import norms_of, times_written
from ga_model.hearing._python_state import is_of_library
from ga_model.torch_engine._not_known import otherwise


class WrittenSince:
    """Tells which tensors are written to from now on: by PyTorch's count, or by their norms.

    Args:
        named: pairs of a name and a tensor.
        has_norms: whether norms are compared, too, which see what is written through `.data`.
    """

    def __init__(self, named: Iterable[tuple[str, Any]], has_norms: bool) -> None:
        self._named = list(named)
        self._versions = [times_written(tensor) for _, tensor in self._named]
        self._norms = self._norms_now() if has_norms else None

    def names(self) -> list[str]:
        """Return the names of those that were written to."""
        pairs = zip(self._named, self._versions)
        written = [times_written(tensor) != version for (_, tensor), version in pairs]
        if self._norms is not None and (now := self._norms_now()) is not None:
            by_norm = (now != self._norms).tolist()
            written = [counted or changed for counted, changed in zip(written, by_norm)]
        return [name for (name, _), yes in zip(self._named, written) if yes]

    @otherwise(None)
    def _norms_now(self) -> Any:
        """Return the norms in one tensor, of which those that are no numbers are -1."""
        dense = [_with_norm(t.detach()) for _, t in self._named if t.layout == torch.strided]
        found = iter(norms_of(dense))
        norms = [
            next(found).double().cpu() if t.layout == torch.strided else torch.tensor(0.0).double()
            for _, t in self._named
        ]
        return torch.stack(norms).nan_to_num(-1.0) if norms else torch.zeros(0)


def _with_norm(tensor: Any) -> Any:
    """Return a tensor in a dtype that has a norm: integers and bools have none."""
    return tensor if tensor.dtype.is_floating_point or tensor.dtype.is_complex else tensor.double()


def stores_in(layer: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return where a layer, and those in it, may keep tensors: pairs of a layer and a dict."""
    modules = {id(m): (m, part) for part in layers_in(layer) for m in part.modules()}
    stores = [(part, module._buffers) for module, part in modules.values()]
    return stores + [(part, vars(m)) for m, part in modules.values() if not is_of_library(m)]


def tensors_in(stores: list[tuple[Any, dict[str, Any]]]) -> list[tuple[str, Any, str, Any]]:
    """Return the tensors that are kept: what messages call each, its dict, its name, and it."""
    return [
        (f"the tensor `{name}` of {part.name!r}", store, name, tensor)
        for part, store in stores
        for name, tensor in store.items()
        if torch.is_tensor(tensor) and tensor.device.type != "meta"
    ]


class Tensors:
    """Tensors as they are now.

    Args:
        layer: the layer, or model, whose buffers and attributes they are, and of the layers in it.
        variables: others.
    """

    def __init__(self, layer: Any, variables: Iterable[Any] = ()) -> None:
        found = tensors_in(stores_in(layer))
        self._found = [(*each, each[-1].detach().clone()) for each in found]
        self._found += [(v.path, {}, "", raw(v), raw(v).detach().clone()) for v in variables]

    def changed(self) -> list[str]:
        """Return the names of those that have another value of the same shape now."""
        names = []
        for text, store, name, tensor, value in self._found:
            now = store.get(name, tensor)
            is_state = torch.is_tensor(now) and now.shape == value.shape
            if is_state and not _is_same(now, value):
                names.append(text)
        return names

    def put_back(self) -> None:
        """Let them be as they were."""
        for _, store, name, tensor, value in self._found:
            if name:
                store[name] = tensor
            if not _is_same(tensor, value):
                tensor.detach().copy_(value)


@otherwise(False)
def _is_same(tensor: Any, value: Any) -> bool:
    if tensor.dtype != value.dtype:
        return False
    return bool(torch.allclose(tensor.detach(), value, rtol=0.0, atol=0.0, equal_nan=True))
