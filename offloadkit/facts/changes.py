"""Changes to a model's computation while it trains, registered per library by `offloadkit/__init__.py`.

A library's module is imported when a model of it is first trained or planned. `claim` sets attributes that several
models share, such as a config's, and restores them when the last model is done.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from offloadkit.facts.config import OffloadConfig


class Change(Protocol):
    def __call__(
        self, model: nn.Module, config: OffloadConfig, *, kernels: bool, capability: tuple[int, int] | None = None
    ) -> Callable[[], None]: ...


_of_library: dict[str, Callable[[], Change]] = {}


def register(library: str, load: Callable[[], Change]) -> None:
    """Register a `Change` for models with a module of `library`; `load` imports it."""
    _of_library[library] = load


def changed(
    model: nn.Module, config: OffloadConfig, *, kernels: bool, capability: tuple[int, int] | None = None
) -> Callable[[], None]:
    """Apply the registered changes to `model`, for a GPU of `capability` (None: the local one) if `kernels`; returns a
    function that undoes them.
    """
    undo = ExitStack()
    for library, load in _of_library.items():
        if library in sys.modules and any(_is_of(library, type(module)) for module in model.modules()):
            undo.callback(load()(model, config, kernels=kernels, capability=capability))
    return undo.close


def _is_of(library: str, kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == library for base in kind.__mro__)


# ---- attributes of shared objects: two models may have the same config ----------------------------------------------


@dataclass
class _Claimed:
    owner: Any
    before: Any
    values: dict[object, Any] = field(default_factory=dict)
    plain: Any = None


claims: dict[tuple[int, str], _Claimed] = {}
_lock = threading.RLock()  # reentrant: garbage collection of an engine may run `undo` while this thread has the lock


def claim(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a shared object; returns a function that releases the claim.

    The newest claim's value holds. Releasing the last claim restores the original value, unless other code has set it
    since.
    """
    key, mine = (id(owner), name), object()
    with _lock:
        found = claims.get(key)
        if found is None:
            found = _Claimed(owner, getattr(owner, name))
        found.values[mine] = value
        claims[key] = found  # again, because an engine collected just now may have removed it
        setattr(owner, name, value)

    def undo() -> None:
        with _lock:
            if mine not in found.values:
                return
            shown = next(reversed(found.values.values()))
            del found.values[mine]
            left = next(reversed(found.values.values()), found.before)
            if getattr(owner, name) == shown:
                setattr(owner, name, left)
            if not found.values:
                claims.pop(key, None)

    return undo


def unclaimed(owner: Any, name: str) -> Any:
    found = claims.get((id(owner), name))
    return getattr(owner, name) if found is None else found.before


def without_claims(owner: Any) -> Any:
    """`owner` if it has no claims, else a copy without them, always the same object."""
    found = [(name, each) for (identity, name), each in list(claims.items()) if identity == id(owner)]
    if not found:
        return owner
    first = found[0][1]
    fresh = deepcopy(owner)
    for name, each in found:
        setattr(fresh, name, each.before)
    if first.plain is None:
        first.plain = fresh
    else:
        vars(first.plain).update(vars(fresh))
    return first.plain


# ---- configs of HuggingFace models -----------------------------------------------------------------------------------


def longest_of_model(config: Any) -> int | None:
    """The limit of a model in tokens, by its config; None: no limit, as in T5, whose positions are relative."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = [getattr(text_config, name, None) for name in ("max_position_embeddings", "n_positions")]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def num_rotated(config: Any) -> int | None:
    """`longest_of_model`, or more if the config scales rotary embeddings (`rope_parameters`)."""
    limit = longest_of_model(config)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scaling = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None)
    named = scaling if isinstance(scaling, dict) else {}
    factor, learned = named.get("factor"), named.get("original_max_position_embeddings")
    if limit is None or not isinstance(factor, int | float) or not isinstance(learned, int):
        return limit
    return max(limit, int(factor * learned))


# ---- the key/value cache of HuggingFace models, for generation: in training it is useless and changes rounding -----


def configs_of(model: nn.Module) -> list[Any]:
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


def caching_configs(model: nn.Module) -> list[Any]:
    return [config for config in configs_of(model) if hasattr(config, "use_cache")]


@contextmanager
def without_caches(configs: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as undo:
        for config in configs:
            if unclaimed(config, "use_cache"):  # another model with this config may be in its forward
                undo.callback(claim(config, "use_cache", False))
        yield
