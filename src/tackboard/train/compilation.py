"""Notices what torch compiles while a run trains.

Torch compiles a part of a model at its first call. It compiles the part again if a later call breaks an assumption, for
example about a size. The call then takes seconds instead of milliseconds, and nothing says so. `CompilationWatch` takes
a model with compiled parts. After each step it tells which parts torch compiled in this step, and why.

Decided: the list of torch's own measurements is read (`torch._dynamo.utils.get_compilation_metrics`). Torch keeps this
list anyway, so reading it costs nothing. The list has the reason of each compilation. Torch's log of recompilations has
the same reasons, but switching on this log changes what torch prints. The list is not a public interface of torch. If a
version of torch lacks the list, the watch sees nothing, and training goes on. Compilations of the backward pass have no
reason of their own: they follow the compilation of their forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

LONGEST_REASON = 300
"""Largest number of characters of a reason. Torch's reasons may name every parameter."""


class Compiled(NamedTuple):
    """A part that torch has compiled."""

    part: str
    """The class and method of the part, or torch's function that continues the part after a graph break."""
    reason: str
    """The assumption that a call has broken, in torch's words."""


class CompilationWatch:
    """Remembers which compilations it has reported. Compilations that are older than the watch are never reported."""

    def __init__(self, model: nn.Module) -> None:
        self._parts: dict[tuple[str, int], str] = {}
        for kind in {type(module) for module in model.modules()}:
            code = getattr(kind.forward, "__code__", None)
            if code is not None and "forward" in vars(kind):
                self._parts[code.co_filename, code.co_firstlineno] = f"{kind.__name__}.forward"
        self._last: Any = None
        self.news()

    def news(self) -> list[Compiled]:
        """Returns what was compiled since the last call, in order."""
        entries = _measurements()
        newest = [number for number, entry in enumerate(entries) if entry is self._last]
        fresh = entries[newest[-1] + 1 :] if newest else entries
        self._last = entries[-1] if entries else None
        return [self._described(entry) for entry in fresh if entry.is_forward is not False and entry.co_name]

    def _described(self, entry: Any) -> Compiled:
        place = (entry.co_filename, entry.co_firstlineno)
        reason = entry.recompile_reason or entry.fail_reason or "it was not called before"
        return Compiled(self._parts.get(place, entry.co_name), " ".join(reason.split())[:LONGEST_REASON])


def _measurements() -> Sequence[Any]:
    """Returns torch's measurements of its newest compilations, the oldest first."""
    try:
        # This import loads torch's compiler, which takes seconds. So it is here, and not at the top of the module.
        from torch._dynamo.utils import get_compilation_metrics
    except ImportError:
        return ()
    return get_compilation_metrics()
