"""Changes the sizes that a module of sd-scripts gives its models, right after the module has run. No file changes.

The import hook of benchmarks/tiny_flux.py runs this file with `module` bound to the module (TINY_FAULTS). TINY_SIZES
names a JSON file: module → name → new value. The value of a name is

* a plain value: replaces a constant of the module;
* an object: keywords that win over those given to a class or function, or fields of a dataclass's instance;
* a list of pairs below "constants": numbers that stand in the body of a function (`Class.method`), old and new.

A name or number that is missing is an error: the sizes of this version are written in another way, and a full-size
model would fill the memory. Standard library only.
"""

import dataclasses
import inspect
import json
import os
import types
from pathlib import Path
from typing import Any


def shrink(module: types.ModuleType, sizes: dict[str, Any]) -> None:
    """Apply the sizes of one module. Raises LookupError for a name or a number that is missing."""
    for name, value in sizes.items():
        if name == "constants":
            for function, pairs in value.items():
                change_constants(module, function, [tuple(_hashable(n) for n in pair) for pair in pairs])
            continue
        if not hasattr(module, name):
            raise LookupError(f"{module.__name__} has no {name}: its models cannot be made tiny")
        found = getattr(module, name)
        if not isinstance(value, dict):
            setattr(module, name, type(found)(value) if isinstance(found, (tuple, list)) else value)
        elif dataclasses.is_dataclass(found) and not isinstance(found, type):
            setattr(module, name, dataclasses.replace(found, **value))
        elif isinstance(found, type) and found.__module__ == module.__name__:
            found.__init__ = forced(found.__init__, value)  # type: ignore[misc]
        else:
            setattr(module, name, lambda _call=found, _value=value, **given: _call(**merged(given, _value)))


def forced(original, values: dict[str, Any]):
    """Return a method that takes `values` in place of what it is given under those names."""
    signature = inspect.signature(original)

    def __init__(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        given.arguments.update(values)
        return original(*given.args, **given.kwargs)

    return __init__


def merged(given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with `values`; objects in both are merged, too."""
    both = {k: merged(given.get(k) or {}, v) if isinstance(v, dict) else v for k, v in values.items()}
    return {**given, **both}


def change_constants(module: types.ModuleType, name: str, pairs: list[tuple[Any, ...]]) -> None:
    """Replace numbers in the body of a function of the module, its inner functions included."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    function = getattr(found, "__func__", found)
    if not isinstance(function, types.FunctionType):
        raise LookupError(f"{module.__name__} has no {name}: its models cannot be made tiny")
    missing = {old for old, _ in pairs}
    function.__code__ = _changed(function.__code__, dict(pairs), missing)  # type: ignore[arg-type]
    if missing:
        raise LookupError(f"{module.__name__}.{name} holds no {sorted(map(str, missing))}: it cannot be made tiny")


def _changed(code: types.CodeType, new: dict[Any, Any], missing: set[Any]) -> types.CodeType:
    def one(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _changed(constant, new, missing)
        if isinstance(constant, (int, tuple)) and not isinstance(constant, bool) and constant in new:
            missing.discard(constant)
            return new[constant]
        return constant

    return code.replace(co_consts=tuple(one(constant) for constant in code.co_consts))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "tiny_fault":
    shrink(module, json.loads(Path(os.environ["TINY_SIZES"]).read_text(encoding="utf-8"))[module.__name__])  # type: ignore[name-defined] # noqa: F821
