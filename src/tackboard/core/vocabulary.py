"""Defines the names that data and models share: actions and surfaces with their indices, and standard features.

A surface is the place in a product where an event happened, such as home or search.

Index 0 is reserved for names that training never saw, so a new action in production has a defined embedding instead of
an error. The lists are part of every checkpoint and bundle. They are sorted, so that the same data gives the same
indices. If a run goes on with an earlier run on newer data, new names come after the old ones, whose indices stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

DEFAULT_READS = ("history.item", "history.action", "history.surface", "history.time")
"""The features that a model reads if it does not name any."""
SINCE_LAST = "since_last"
"""Standard feature of a request: the seconds since the user's newest event."""
DEFAULT_ACTION = "event"
"""The action of an event if its log or request has no actions."""
DEFAULT_SURFACE = "default"
"""The surface of an event if its log or request has no surfaces."""
UNKNOWN_NAME = "unknown"
"""The name that replaces an empty name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The actions and surfaces that a model knows. Name i, counted from 0, has index i + 1."""

    actions: tuple[str, ...]
    surfaces: tuple[str, ...]

    @classmethod
    def from_names(cls, actions: Iterable[str], surfaces: Iterable[str]) -> Vocabulary:
        """Makes a vocabulary of the distinct names, sorted."""
        return cls(actions=tuple(sorted(set(actions))), surfaces=tuple(sorted(set(surfaces))))

    @classmethod
    def from_dict(cls, names: Mapping[str, Sequence[str]]) -> Vocabulary:
        """Makes a vocabulary from the names in a checkpoint, in the order of the checkpoint."""
        return cls(actions=tuple(names["actions"]), surfaces=tuple(names["surfaces"]))

    def grown(self, names: Vocabulary) -> Vocabulary:
        """Returns this vocabulary and, after it, the names that only `names` has. Old names keep their indices."""
        return Vocabulary(
            actions=tuple(dict.fromkeys((*self.actions, *names.actions))),
            surfaces=tuple(dict.fromkeys((*self.surfaces, *names.surfaces))),
        )

    @property
    def num_actions(self) -> int:
        """Number of rows that an action embedding needs, including the row for unknown actions."""
        return len(self.actions) + 1

    @property
    def num_surfaces(self) -> int:
        """Number of rows that a surface embedding needs, including the row for unknown surfaces."""
        return len(self.surfaces) + 1
