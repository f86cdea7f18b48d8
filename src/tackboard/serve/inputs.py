"""Derives the tensors that a model takes (names, datatypes, shapes) from its features, and reads tensors as columns.

    candidate_item [C], history_item [S]        always required
    history_time_ms [S]                         always accepted; required if the features need times; sorts the events
    history_action, history_surface [S]         if the features read them
    history_<field> [S], candidate_<attribute> [C], user_<attribute> [1], context_<name> [1]   if the features read them
    <name>_present                              for each tensor of the line above: false where a value is missing
    request_time_ms [1], user [1]               always accepted; required if the features read them

Decided: a missing tensor gets the values that the importer writes for a missing column of a log (`RequestReader`). A
tensor that this model does not read is skipped without decoding if the protocol or the training feature set knows its
name. So a client can send one request to several models. A tensor with an unknown name is refused, because the name is
usually a typo. The protocol has no tensor of lists, so each list is sent as JSON text. `check` compares names,
datatypes and shapes with the model's inputs before any value is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from tackboard.core.errors import DataError, UsageError
from tackboard.features.column import DTYPES, Column
from tackboard.features.types import FeatureType
from tackboard.scoring.request import PREFIXES, PRESENT_SUFFIX, RequestReader, ScoreRequest
from tackboard.serve.errors import bad_request, shown
from tackboard.serve.protocol import DeclaredTensor
from tackboard.serve.tensors import Tensor

CANDIDATE, REQUEST_TIME, USER = "candidate_item", "request_time_ms", "user"
HISTORY_PREFIX = "history_"
OUTPUT_NAME = "score"
SKIPPABLE = ("history_action", "history_surface")
"""Inputs that every client may send, whether or not the model reads them."""
MAX_EVENTS = 100_000
"""Default limit on the number of events in one history; a model reads only the newest events."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input tensor. Descriptions show the first of `datatypes`; `width` is a vector's width, 0 for plain values."""

    datatypes: tuple[str, ...]
    optional: bool = True
    width: int = 0
    type: FeatureType | None = None

    @property
    def shape(self) -> list[int]:
        """The shape in descriptions, with -1 for a size that varies."""
        return [-1, self.width] if self.width else [-1]


class ModelInputs:
    """Checks the tensors of requests against what a model takes, and reads them.

    `inputs` holds the tensors that the model takes, by name; `skipped` names tensors that are accepted but not read. A
    request has at most `max_candidates` candidates. A history has at most `max_events` events, or at most the model's
    max_history if that is larger.
    """

    def __init__(self, reader: RequestReader, *, max_candidates: int, max_events: int = MAX_EVENTS) -> None:
        self.reader = reader
        self.max_candidates = max_candidates
        self.max_events = max(max_events, reader.signature.max_history)
        self._id_types = ("BYTES", "INT64") if reader.signature.id_type == "string" else ("INT64", "BYTES")
        only_id = self._id_types[:1]
        self.inputs = {f"{HISTORY_PREFIX}item": Input(only_id, optional=False)}
        for name in SKIPPABLE:
            if name.removeprefix(HISTORY_PREFIX) in reader.history:
                self.inputs[name] = Input(("BYTES",))
        self.inputs["history_time_ms"] = Input(("INT64",), optional=not reader.needs_event_times)
        self.inputs[CANDIDATE] = Input(only_id, optional=False)
        self.inputs[REQUEST_TIME] = Input(("INT64",), optional=not reader.needs_request_time)
        user_types = {"string": ("BYTES",), "int64": ("INT64",)}.get(reader.signature.user_type, self._id_types)
        self.inputs[USER] = Input(user_types, optional=not reader.needs_user)
        values = {f"{HISTORY_PREFIX}{name}": reader.history[name] for name in reader.fields}
        values |= {name: type_ for name, (_, _, type_) in reader.attributes.items()}
        for name, type_ in values.items():
            self.inputs[name] = Input(self._datatypes(type_), width=type_.width, type=type_)
        # If the name of a mask (`<name>_present`) is also the name of an attribute, this tensor holds the attribute.
        self._masks = {name + PRESENT_SUFFIX: name for name in values if name + PRESENT_SUFFIX not in values}
        self.inputs |= dict.fromkeys(self._masks, Input(("BOOL",)))
        known = {*SKIPPABLE, *reader.skipped, *(name + PRESENT_SUFFIX for name in reader.skipped)}
        self.skipped = frozenset(name for name in known if name not in self.inputs)

    def check(self, declared: Mapping[str, DeclaredTensor]) -> None:
        """Raises 400 if the model does not take tensors of these names, datatypes and shapes."""
        for name in declared:
            if name not in self.inputs:
                allowed = [known for known in self.inputs if known not in self._masks]
                raise bad_request(f"there is no input {shown(name)}; allowed: {', '.join(allowed)}")
        for name, tensor in declared.items():
            self._check_kind(name, tensor)
        for name in (f"{HISTORY_PREFIX}item", CANDIDATE):
            if name not in declared:
                raise bad_request(f"input {name} is missing")
        num_candidates = declared[CANDIDATE].shape[0]
        if not 1 <= num_candidates <= self.max_candidates:
            raise bad_request(f"input {CANDIDATE} has {num_candidates} values; allowed: 1 to {self.max_candidates}")
        for name, tensor in declared.items():
            self._check_rows(name, tensor.shape[0], declared)

    def read(self, tensors: Mapping[str, Tensor]) -> ScoreRequest:
        """Makes a `ScoreRequest` from tensors that passed `check`; raises 400 if the model cannot take their values."""
        given = {
            name: np.asarray(tensor.values).reshape(tensor.shape) if self.inputs[name].width else tensor.values
            for name, tensor in tensors.items()
        }
        columns = {name: self._column(name, values, given) for name, values in given.items()}
        reader = self.reader
        history = {name: f"{HISTORY_PREFIX}{name}" for name in ("item", "action", "surface", "time_ms", *reader.fields)}
        try:
            return reader.read(
                {name: columns[tensor] for name, tensor in history.items() if tensor in columns},
                columns[CANDIDATE],
                request_ms=_only(REQUEST_TIME, columns),
                user=_only(USER, columns),
                attributes={name: columns[name] for name in reader.attributes if name in columns},
            )
        except (UsageError, DataError) as error:
            raise bad_request(str(error).replace("\n", "; ")) from None

    def _datatypes(self, type_: FeatureType) -> tuple[str, ...]:
        if type_.kind == "id":
            return self._id_types
        return {
            "bool": ("BOOL",),
            "int": ("INT64",),
            "time": ("INT64",),
            "float": ("FP64", "FP32"),
            "vector": ("FP32", "FP64"),
        }.get(type_.kind, ("BYTES",))

    def _check_kind(self, name: str, tensor: DeclaredTensor) -> None:
        wanted = self.inputs[name]
        if tensor.datatype not in wanted.datatypes:
            takes = " or ".join(wanted.datatypes)
            raise bad_request(f"input {name} is {tensor.datatype}; this model takes {takes}")
        if wanted.width:
            if len(tensor.shape) != 2 or tensor.shape[1] != wanted.width:
                raise bad_request(f"input {name} has shape {list(tensor.shape)}; this model takes {wanted.shape}")
        elif len(tensor.shape) != 1:
            raise bad_request(f"input {name} has {len(tensor.shape)} dimensions; this model takes one")

    def _check_rows(self, name: str, num_rows: int, declared: Mapping[str, DeclaredTensor]) -> None:
        if whole := self._masks.get(name):
            if whole not in declared:
                raise bad_request(f"input {name} is given without input {whole}")
            if num_rows != (expected := declared[whole].shape[0]):
                raise bad_request(f"input {name} has {num_rows} values; {whole} has {expected}")
        elif name in (REQUEST_TIME, USER):
            if num_rows != 1:
                raise bad_request(f"input {name} has {num_rows} values; this model takes one")
        elif name.startswith(HISTORY_PREFIX):
            if num_rows > self.max_events:
                raise bad_request(f"input {name} has {num_rows} values; at most {self.max_events} events are allowed")
        elif name != CANDIDATE:
            expected = declared[CANDIDATE].shape[0] if name.startswith(PREFIXES["item"]) else 1
            if num_rows != expected:
                raise bad_request(f"input {name} has {num_rows} values; allowed: {expected}")

    def _column(self, name: str, values: Any, given: Mapping[str, Any]) -> Any:
        """Returns values in the form that the request reader takes. A value is missing if its mask is false."""
        type_ = self.inputs[name].type
        if type_ is None:
            return values
        mask_name = name + PRESENT_SUFFIX
        mask = given.get(mask_name) if mask_name in self._masks else None
        if isinstance(values, list):
            found = (
                values if mask is None else [v if present else None for v, present in zip(values, mask, strict=True)]
            )
            return [_json_list(name, place, v) for place, v in enumerate(found)] if type_.kind == "list" else found
        if mask is None:
            return values
        return Column(type_, values.astype(DTYPES[type_.kind]), present=np.asarray(mask, dtype=np.bool_))


def _only(name: str, columns: Mapping[str, Any]) -> Any:
    return columns[name][0] if name in columns else None


def _json_list(name: str, position: int, text: str | None) -> Any:
    if text is None:
        return None
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        content = None
    if not isinstance(content, list):
        raise bad_request(f"value {position} of input {name} is not a JSON list")
    return content
