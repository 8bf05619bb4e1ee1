"""Cache and threshold policies: frozen values with ``init`` and a compiled ``step``; one policy, one file.

The simulator and the executor call the same machine code: a step is a first-class compiled function of one
signature (STEP), so that the compiled replay takes any of them without being compiled again. docs/policies.md
tells how to add one.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import dinfer.compiled  # noqa: F401 - sets numba's cache before anything is compiled
from dinfer.errors import InputError
from dinfer.policies.balanced import Balanced, Fixed
from dinfer.policies.belady import Belady
from dinfer.policies.hot_predicted import HotPredicted
from dinfer.policies.lfu import Lfu
from dinfer.policies.lru import Lru
from dinfer.policies.protocol import Cache
from dinfer.policies.random import Random
from dinfer.policies.s3fifo import S3Fifo
from dinfer.policies.static import Static
from dinfer.policies.time_saved import TimeSaved

CACHES: dict[str, type[Cache]] = {
    "belady": Belady,
    "hot_predicted": HotPredicted,
    "lfu": Lfu,
    "lru": Lru,
    "random": Random,
    "s3fifo": S3Fifo,
    "static": Static,
    "time_saved": TimeSaved,
}

THRESHOLDS: dict[str, type[Balanced] | type[Fixed]] = {"balanced": Balanced, "fixed": Fixed}


def cache_to_dict(cache: Cache) -> dict[str, Any]:
    """Name and parameters of a cache policy as plain values."""
    return {"name": cache.name, **asdict(cache)}  # type: ignore[call-overload]


def cache_from_dict(values: Mapping[str, Any]) -> Cache:
    """The cache policy that ``cache_to_dict`` wrote; raises InputError for an unknown name or parameter."""
    parameters = dict(values)
    name = parameters.pop("name", None)
    if name not in CACHES:
        raise InputError(f"cache {name!r} is not one of {', '.join(CACHES)}")
    known = [f.name for f in fields(CACHES[name])]  # type: ignore[arg-type]
    if unknown := set(parameters) - set(known):
        raise InputError(f"cache {name} has no parameter {sorted(unknown)[0]!r}; it has {', '.join(known) or 'none'}")
    return CACHES[name](**parameters)
