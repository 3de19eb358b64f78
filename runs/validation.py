"""Turns pydantic's validation errors into faults with sentences of our own: the field, the problem, what to do.

Pydantic's sentences are written for programmers ("Input should be a valid integer, unable to parse string as an
integer"). TABLE has one sentence for each type of error that a RunSpec can raise.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from runs.files import Fault

WHOLE = "Not a whole number; write for example 4"
NUMBER = "Not a number; write for example 0.0001"
VALUE = "Must be text, a number, true, false or a list of texts"

# Type of pydantic's error -> sentence. {…} are limits from the error's context.
TABLE: dict[str, str] = {
    "missing": "Missing; add a value",
    "string_type": "Must be text",
    "string_unicode": "Not valid Unicode text; type it again",
    "int_type": WHOLE,
    "int_parsing": WHOLE,
    "int_parsing_size": "Too large; write a smaller number",
    "int_from_float": WHOLE,
    "float_type": NUMBER,
    "float_parsing": NUMBER,
    "finite_number": NUMBER,
    "greater_than_equal": "Must be {ge} or more",
    "greater_than": "Must be more than {gt}",
    "less_than_equal": "Must be {le} or less",
    "less_than": "Must be less than {lt}",
    "multiple_of": "Must be a multiple of {multiple_of}",
    "literal_error": "Must be {choices}",
    "list_type": "Must be a list of texts",
    "dict_type": "Must be a table of names and values",
    "invalid_key": "The name of a field must be text",
    "model_type": "Must be a table of fields",
    "extra_forbidden": "Unknown field; {similar}",
}
UNKNOWN = "Not a valid value; compare with `python -m runs show NAME`"


class FieldError(ValueError):
    """A fault found by a validator of the whole model, which must name the field itself."""

    def __init__(self, field: str, message: str):
        self.field = field
        super().__init__(message)


def faults(errors: Iterable[Mapping[str, Any]], model: type[BaseModel]) -> list[Fault]:
    """One fault for each field that is wrong.

    Args:
        errors: those of a ValidationError. model: the class that was validated.
    """
    # A value of `extra` is tried as each type of a union, and each type reports an error: one line is enough.
    return list(dict.fromkeys(_fault(error, model) for error in errors))


def _fault(error: Mapping[str, Any], model: type[BaseModel]) -> Fault:
    place = [_shown(part) for part in error["loc"] if part != "[key]"]
    field, inside = (place[0] if place else "run.toml"), "".join(f"{part}: " for part in place[1:])
    if error["type"] == "value_error":  # raised by a validator of the model: already a sentence of ours
        found = error["ctx"]["error"]
        return Fault(found.field if isinstance(found, FieldError) else field, str(found))
    if field == "extra" and inside:
        return Fault(field, f"{place[1]}: {VALUE}")
    if field == "prompts" and inside:
        return Fault(field, f"Prompt {int(place[1]) + 1} must be text")
    details = {key: f"{value:g}" if isinstance(value, float) else value for key, value in error.get("ctx", {}).items()}
    details |= {"similar": _similar(field, model), "choices": _choices(field, model)}
    return Fault(field, inside + TABLE.get(error["type"], UNKNOWN).format(**details))


def _shown(part: object) -> str:
    """A field's name; quoted where it is not a plain word."""
    return str(part) if re.fullmatch(r"[\w-]+", str(part)) else repr(part)


def _similar(field: str, model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(field, model.model_fields, n=3)
    return f"did you mean {', '.join(close)}?" if close else "remove it"


def _choices(field: str, model: type[BaseModel]) -> str:
    values = get_args(model.model_fields[field].annotation) if field in model.model_fields else ()
    shown = "one of " + ", ".join(str(value) for value in values if value != "")
    return shown + (", or empty" if "" in values else "")
