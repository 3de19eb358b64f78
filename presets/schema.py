"""Reads flags, types, choices, defaults and help of a trainer's argument parser from its source, without importing it.

Importing sd-scripts' parser needs torch, five seconds and its complete environment; the page has none of these. The
parsers are plain `add_argument` calls in functions that call each other. The reader starts at the script's
`setup_parser`, or where a script has none (musubi-tuner) at what its `main` does before it parses, and follows every
call that passes the parser on, also into imported modules. It decides branches on a function's parameters (`if
support_dreambooth:`) from the literal arguments of the call. A default that is computed is marked as such, never
guessed. The result is kept by the commit of the checkout.
"""

import ast
import copy
from pathlib import Path
from typing import Any

from presets.tables import PresetError

UNKNOWN = object()
TYPES = {"int": "int", "float": "float", "str": "str", "Path": "str", "int_or_float": "float"}
ADDER = "add_argument"


def sd_scripts(checkout: Path, script: str = "flux_train_network.py") -> dict[str, dict]:
    """The flags of a script in an sd-scripts checkout by name (without dashes), in the parser's order.

    Each: {type: bool|int|float|str, nargs, choices, default, required, help}, and default_is_computed where the default is none of literals.

    Raises:
        PresetError: the script does not exist or has no `setup_parser`.
    """
    return _cached(checkout, script, checkout, "setup_parser", ("sd-scripts", "SD_SCRIPTS_DIR"))


def musubi(checkout: Path, script: str) -> dict[str, dict]:
    """The flags of a script in a checkout of musubi-tuner (its path in it); same form as `sd_scripts`.

    Raises:
        PresetError: the script does not exist or has no `main`.
    """
    return _cached(checkout, script, checkout / "src", "main", ("musubi", "MUSUBI_DIR"))


def _cached(checkout: Path, script: str, root: Path, entry: str, trainer: tuple[str, str]) -> dict[str, dict]:
    """The flags that the function `entry` of a script adds before it parses; read once a process for a commit of the checkout.

    Args:
        root: where imports begin. trainer: the words of its installation, and the variable of its folder.
    """
    path, (name, variable) = checkout / script, trainer
    if not path.is_file():
        raise PresetError(f"{path} does not exist; run ./start.sh {name}, or set {variable}")
    key = (checkout, script, commit(checkout), path.stat().st_mtime_ns)
    if key[2] is None or key not in _known:
        reader = _Reader(root)
        module = reader.module(path)
        if entry not in module.functions:
            raise PresetError(f"{path}: no function {entry}; this version is not supported, run ./start.sh {name}")
        reader.run_until(module, entry, "parse_args")
        _known[key] = reader.flags
    return copy.deepcopy(_known[key])


_known: dict[tuple[Path, str, str | None, int], dict[str, dict]] = {}


def commit(checkout: Path) -> str | None:
    """The current commit of a git checkout, read from its files; None when it cannot be found there."""
    try:
        head = (checkout / ".git" / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head or None
        name = head.removeprefix("ref: ")
        loose = checkout / ".git" / name
        if loose.is_file():
            return loose.read_text(encoding="utf-8").strip() or None
        for line in (checkout / ".git" / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {name}"):
                return line.split()[0]
    except OSError:
        return None
    return None


def _tail(node: ast.expr) -> str:
    """The last name of `a.b.c`, or ""."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Module:
    """One source file: its functions, constants and imports."""

    def __init__(self, path: Path):
        self.tree = ast.parse(path.read_bytes(), filename=str(path))
        self.functions: dict[str, ast.FunctionDef] = {}
        self.constants: dict[str, Any] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}  # local name: (module, name in it or None)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.split(".")[0]] = (alias.name, None)
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                value = literal(node.value, self.constants)
                if value is not UNKNOWN:
                    self.constants[node.targets[0].id] = value


class _Reader:
    """Follows a parser through the functions that add to it and collects the flags."""

    def __init__(self, root: Path):
        self.root = root
        self.modules: dict[Path, _Module] = {}
        self.flags: dict[str, dict] = {}

    def module(self, path: Path) -> _Module:
        if path not in self.modules:
            try:
                self.modules[path] = _Module(path)
            except (OSError, SyntaxError, ValueError) as error:
                raise PresetError(
                    f"{path} cannot be parsed as Python ({error}); restore the file with `git checkout`"
                ) from error
        return self.modules[path]

    def run(self, module: _Module, name: str, args: list[Any], keywords: dict[str, Any]) -> None:
        """Read a function's body with the known values of its parameters."""
        function = module.functions[name]
        names = [a.arg for a in function.args.args]
        known = dict(zip(reversed(names), map(literal, reversed(function.args.defaults)), strict=False))
        known |= dict(zip(names, args, strict=False)) | keywords
        self._block(module, function.body, known, {ADDER})

    def run_until(self, module: _Module, name: str, method: str) -> None:
        """Read a function's body up to the statement that calls `.method(…)`."""
        body = []
        for node in module.functions[name].body:
            if any(isinstance(call, ast.Call) and _tail(call.func) == method for call in ast.walk(node)):
                break
            body.append(node)
        self._block(module, body, {}, {ADDER})

    def _block(self, module: _Module, body: list[ast.stmt], known: dict, aliases: set[str]) -> None:
        for node in body:
            if isinstance(node, ast.If):
                value = literal(node.test, known)
                for branch, wanted in ((node.body, True), (node.orelse, False)):
                    if value is UNKNOWN or bool(value) is wanted:
                        self._block(module, branch, known, aliases)
            elif isinstance(node, ast.For | ast.With | ast.Try):
                self._block(module, node.body, known, aliases)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.Attribute) and node.value.attr == ADDER:
                    aliases.add(node.targets[0].id)
                elif isinstance(node.value, ast.Call):
                    self._call(module, node.value, known, aliases)
            elif isinstance(node, ast.Expr | ast.Return) and isinstance(node.value, ast.Call):
                self._call(module, node.value, known, aliases)

    def _call(self, module: _Module, call: ast.Call, known: dict, aliases: set[str]) -> None:
        if _tail(call.func) in aliases:
            self._add(call, {**module.constants, **known})
            return
        target = self._find(module, call.func)
        if target is not None:
            other, name = target
            args = [literal(a, {**module.constants, **known}) for a in call.args]
            keywords = {k.arg: literal(k.value, {**module.constants, **known}) for k in call.keywords if k.arg}
            self.run(other, name, args, keywords)

    def _find(self, module: _Module, func: ast.expr) -> tuple[_Module, str] | None:
        """The module and name of the called function; None where it is not in this checkout."""
        if isinstance(func, ast.Name):
            if func.id in module.functions:
                return module, func.id
            source, name = module.imports.get(func.id, (None, None))
            dotted = source
        elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            source, inner = module.imports.get(func.value.id, (None, None))
            dotted, name = (f"{source}.{inner}" if inner else source), func.attr
        else:
            return None
        if not dotted or not name:
            return None
        path = self.root.joinpath(*dotted.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                other = self.module(candidate)
                if name not in other.functions and name in other.imports:  # re-exported
                    return self._find(other, ast.Name(name))
                return (other, name) if name in other.functions else None
        return None

    def _add(self, call: ast.Call, known: dict) -> None:
        names = [value for arg in call.args if isinstance(value := literal(arg, known), str)]
        long = [name for name in names if name.startswith("--")]
        if not long:
            return
        options = {k.arg: k.value for k in call.keywords if k.arg}
        action = literal(options["action"], known) if "action" in options else "store"
        kind = _tail(options["type"]) if "type" in options else "str"
        switch = action in ("store_true", "store_false")
        default = literal(options["default"], known) if "default" in options else (False if switch else None)
        choices = literal(options["choices"], known) if "choices" in options else None
        text = literal(options["help"], known) if "help" in options else ""
        nargs = literal(options["nargs"], known) if "nargs" in options else None
        entry = {
            "type": "bool" if switch else TYPES.get(kind, "str"),
            "nargs": None if nargs is UNKNOWN else nargs,
            "choices": None if choices in (UNKNOWN, None) else [c for c in choices if c is not None],
            "default": None if default is UNKNOWN else default,
            "required": "required" in options and literal(options["required"], known) is True,
            "help": "" if text is UNKNOWN else text,
        }
        if default is UNKNOWN:
            entry["default_is_computed"] = True
        self.flags[long[0].removeprefix("--")] = entry


def literal(node: ast.expr, known: dict[str, Any] | None = None) -> Any:
    """The value of an expression of literals and known names; UNKNOWN when it has other parts."""
    known = known or {}
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if isinstance(node, ast.List | ast.Tuple):
        values = [literal(element, known) for element in node.elts]
        return UNKNOWN if UNKNOWN in values else values
    if isinstance(node, ast.UnaryOp):
        value = literal(node.operand, known)
        if value is UNKNOWN:
            return UNKNOWN
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) else UNKNOWN
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal(node.left, known), literal(node.right, known)
        return UNKNOWN if UNKNOWN in (left, right) or type(left) is not type(right) else left + right
    if isinstance(node, ast.JoinedStr):
        parts = [literal(part, known) for part in node.values]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else UNKNOWN
    return UNKNOWN
