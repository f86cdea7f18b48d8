"""The frame holds the inputs of a plan: R requests, C candidates, E events, and the columns that the plan reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from tackboard.core.errors import UsageError
from tackboard.features.column import Column
from tackboard.features.views import Positions, View


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Frame:
    """Holds the inputs of a computation. `request_of` [C] is each candidate's request; None means a single request."""

    num_requests: int
    num_candidates: int
    request_of: Positions | None
    request_ms: Positions | None
    event_times: Positions
    visible: View
    columns: Mapping[tuple[str, str], Column]

    @property
    def num_events(self) -> int:
        """The number of events, E."""
        return len(self.event_times)

    def times_of(self, view: View) -> Positions:
        """Returns, for each row of a view, the time of the row's request."""
        if self.request_ms is None:
            raise UsageError("these features depend on the time of the request", allowed="give request_ms")
        return self.request_ms if view.requests is None else self.request_ms[view.requests]

    def candidate_requests(self) -> Positions:
        """Returns the request of each candidate [C]."""
        if self.request_of is None:
            return np.zeros(self.num_candidates, dtype=np.int64)
        return self.request_of

    def spread_view(self, view: View) -> View:
        """Turns a view with a row per request into a view with a row per candidate."""
        return view.spread(self.candidate_requests())
