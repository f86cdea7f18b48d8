"""The tensors that one model takes: its features in, names, datatypes and shapes out; and tensors as columns.

    candidate_item [C], history_item [S]        always
    history_time_ms [S]                         always; events are sorted by it
    history_action, history_surface [S]         where the features read them, as all of the following
    history_<field> [S], candidate_<attribute> [C], user_<attribute> [1], context_<name> [1]
    <name>_present                              beside those: false where a value is missing
    request_time_ms [1], user [1]               always; needed where the features read them

Decided: what is left out means what the importer writes when a log leaves it out (`RequestReader`). A tensor that the
protocol knows, or that the set of features declares which the model was trained from, and that this model does not read
is accepted, so that one client can ask several models, and it is skipped before it is decoded. A name that nobody knows
is refused: it is a typo more often than not. A list has no tensor, so each is a text of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tackboard.core.errors import DataError, UsageError
from tackboard.features.column import DTYPES, Column
from tackboard.features.types import FeatureType
from tackboard.scoring.request import PRESENT_SUFFIX, RequestReader, ScoreRequest
from tackboard.serve.errors import bad_request, shown
from tackboard.serve.tensors import Tensor

CANDIDATE, REQUEST_TIME, USER = "candidate_item", "request_time_ms", "user"
HISTORY_PREFIX = "history_"
SKIPPABLE = ("history_action", "history_surface")
"""Inputs that every client may send, whether or not the model reads them."""


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor. The first of `datatypes` is the one in descriptions; `width` is a vector's, 0 for plain values."""

    datatypes: tuple[str, ...]
    optional: bool = True
    width: int = 0
    type: FeatureType | None = None

    @property
    def shape(self) -> list[int]:
        """The shape in descriptions, -1 for what varies."""
        return [-1, self.width] if self.width else [-1]


class ModelInputs:
    """What a model takes, by name in `inputs`; `skipped` names what it accepts and does not read."""

    def __init__(self, reader: RequestReader) -> None:
        self.reader = reader
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
        for name in values:
            self.inputs.setdefault(name + PRESENT_SUFFIX, Input(("BOOL",)))
        known = {*SKIPPABLE, *reader.skipped, *(name + PRESENT_SUFFIX for name in reader.skipped)}
        self.skipped = frozenset(name for name in known if name not in self.inputs)

    def read(self, tensors: Mapping[str, Tensor], max_candidates: int) -> ScoreRequest:
        """The tensors of a request as one `ScoreRequest`; 400 where they are not what the model takes."""
        for name in tensors:
            if name not in self.inputs:
                allowed = [known for known in self.inputs if not self._is_mask(known)]
                raise bad_request(f"there is no input {shown(name)}; allowed: {', '.join(allowed)}")
        given = {name: self._checked(name, tensor) for name, tensor in tensors.items()}
        for name in (f"{HISTORY_PREFIX}item", CANDIDATE):
            if name not in given:
                raise bad_request(f"input {name} is missing")
        num_candidates = len(given[CANDIDATE])
        if not 1 <= num_candidates <= max_candidates:
            raise bad_request(f"{CANDIDATE} has {num_candidates} values; allowed: 1 to {max_candidates}")
        for name in given:
            whole = name.removesuffix(PRESENT_SUFFIX)
            if self._is_mask(name) and whole not in given:
                raise bad_request(f"input {name} is given without {whole}")
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

    def _is_mask(self, name: str) -> bool:
        """Whether an input is a mask, and no attribute that happens to be named like one."""
        return name.endswith(PRESENT_SUFFIX) and self.inputs[name].type is None

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

    def _checked(self, name: str, tensor: Tensor) -> npt.NDArray[Any] | list[str]:
        """The values of a tensor whose datatype and shape are right."""
        wanted = self.inputs[name]
        if tensor.datatype not in wanted.datatypes:
            takes = " or ".join(wanted.datatypes)
            raise bad_request(f"input {name} is {tensor.datatype}; this model takes {takes}")
        if wanted.width:
            if len(tensor.shape) != 2 or tensor.shape[1] != wanted.width:
                raise bad_request(f"input {name} has shape {list(tensor.shape)}; this model takes {wanted.shape}")
            return np.asarray(tensor.values).reshape(tensor.shape)
        if len(tensor.shape) != 1:
            raise bad_request(f"input {name} has {len(tensor.shape)} dimensions; this model takes one")
        return tensor.values

    def _column(self, name: str, values: Any, given: Mapping[str, Any]) -> Any:
        """Values as the request's reader takes them, missing where their mask says so."""
        type_ = self.inputs[name].type
        if type_ is None:
            return values
        mask_name = name + PRESENT_SUFFIX
        mask = given.get(mask_name) if self._is_mask(mask_name) else None
        if mask is not None and len(mask) != len(values):
            raise bad_request(f"input {mask_name} has {len(mask)} values; {name} has {len(values)}")
        if isinstance(values, list):
            found = (
                values if mask is None else [v if present else None for v, present in zip(values, mask, strict=True)]
            )
            return [_json_list(name, place, v) for place, v in enumerate(found)] if type_.kind == "list" else found
        if mask is None:
            return values
        return Column(type_, values.astype(DTYPES[type_.kind]), present=np.asarray(mask, dtype=np.bool_))


def _only(name: str, columns: Mapping[str, Any]) -> Any:
    if name not in columns:
        return None
    if len(columns[name]) != 1:
        raise bad_request(f"input {name} has {len(columns[name])} values; this model takes one")
    return columns[name][0]


def _json_list(name: str, position: int, text: str | None) -> Any:
    if text is None:
        return None
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        content = None
    if not isinstance(content, list):
        raise bad_request(f"input {name} {position} is no JSON list")
    return content
