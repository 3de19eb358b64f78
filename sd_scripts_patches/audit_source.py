"""A checkout's source as names and types: what a dotted name stands for, and which type an expression has.

Nothing is imported. A type is a word of audit_tables (`Future`, `[]Queue` for a container of queues), or `@module:Class` for
a class of the checkout. Types come from constructors, annotations, attributes assigned anywhere in a class, results of known
methods, and, where nothing else is known, from the variable's name. Every assignment of a function counts, in whatever
order: a name that holds a future somewhere is a future.
"""

from __future__ import annotations

import ast
import builtins
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sd_scripts_patches import audit_tables as tables
from sd_scripts_patches import locate
from sd_scripts_patches.patch import Incompatible

MAX_FILE_BYTES = 5 << 20
MAX_HOPS = 30
Def = (ast.FunctionDef, ast.AsyncFunctionDef)
ELEMENTS = frozenset(["pop", "get", "popleft", "popitem", "setdefault", "__getitem__", "next"])
SAME = frozenset(["values", "items", "copy", "keys"])
PASS = frozenset(["list", "tuple", "set", "sorted", "reversed", "iter", "enumerate", "zip", "tqdm", "filter"])


@dataclass(frozen=True)
class Object:
    """What a dotted name stands for: a module, function, class or variable of the checkout, or a name of a library."""

    kind: str  # module | def | class | var | library
    module: str = ""
    name: str = ""  # qualified name in the module; for a library the full dotted name

    @property
    def id(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass
class Binding:
    """One way in which a variable gets its value. how: value | element (of `expression`) | enter (`with`) | adds (to it)."""

    how: str
    expression: ast.expr
    scope: Scope


@dataclass
class Scope:
    """The names of a module or a function. names: imports and definitions; bindings: variables."""

    module: Module
    parent: Scope | None = None
    names: dict[str, str] = field(default_factory=dict)
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    parameters: dict[str, ast.expr | None] = field(default_factory=dict)
    owner: str = ""  # id of the class whose method this is
    self_name: str = ""


@dataclass
class Class:
    """A class of the checkout. bases: as written; methods: name → id of the function."""

    id: str
    node: ast.ClassDef
    scope: Scope
    methods: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)


@dataclass
class Module:
    """A source file. name: as it is imported (`library.train_util`, `musubi_tuner.cache_latents`)."""

    name: str
    file: str
    tree: ast.Module
    package: bool
    scope: Scope = field(init=False)
    top: dict[str, str] = field(default_factory=dict)  # name → "def" or "class", top level
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scope = Scope(self)


class Project:
    """All modules of a checkout. `unread`: file → why it could not be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, Module] = {}
        self.unread: dict[str, str] = {}
        self.classes: dict[str, Class] = {}
        self.scopes: dict[str, Scope] = {}  # id of a function → its scope
        self.functions: dict[str, ast.AST] = {}  # id → definition
        self.method_names: dict[str, list[str]] = {}  # name → ids of the methods
        self._objects: dict[str, Object | None] = {}
        self._members: dict[tuple[str, str], str | None] = {}
        self._types: dict[tuple[int, str], str | None] = {}
        self._subclasses: dict[str, list[str]] | None = None
        for path in python_files(folder):
            file = path.relative_to(folder).as_posix()
            try:
                if path.stat().st_size > MAX_FILE_BYTES:
                    raise Incompatible(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB")
                tree = locate.parse(path)
            except (Incompatible, OSError, MemoryError) as error:
                self.unread[file] = str(error).replace(f"{path}: ", "") or type(error).__name__
                continue
            module = Module(module_name(path.relative_to(folder)), file, tree, path.name == "__init__.py")
            self.modules[module.name] = module
        for module in list(self.modules.values()):
            try:
                _Indexer(self, module).run()
            except RecursionError:
                self.drop(module, "nested too deeply")

    def drop(self, module: Module, why: str) -> None:
        """Remove a module that cannot be judged."""
        self.unread[module.file] = why
        self.modules.pop(module.name, None)
        for ids in self.method_names.values():
            ids[:] = [one for one in ids if one.split(":")[0] != module.name]
        for table in (self.classes, self.functions, self.scopes):
            for one in [one for one in table if one.split(":")[0] == module.name]:
                del table[one]

    # -- names

    def qualify(self, node: ast.AST, scope: Scope) -> str:
        """Return the dotted name of an expression with imports and definitions resolved; "" when a variable stands in it."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        head = self._named(node.id, scope)
        return ".".join([head, *reversed(parts)]) if head else ""

    def _named(self, name: str, scope: Scope) -> str:
        at: Scope | None = scope
        while at is not None:
            if name in at.names:
                return at.names[name]
            if name in at.bindings or name in at.parameters:
                return "" if at.parent is not None else f"{at.module.name}.{name}"
            at = at.parent
        for star in scope.module.stars:
            if star not in self.modules:
                continue
            found = self.object(f"{star}.{name}")
            if found is not None:
                return f"{found.module}.{found.name}" if found.kind != "library" else found.name
        return f"builtins.{name}" if hasattr(builtins, name) else ""

    def object(self, dotted: str, hops: int = 0) -> Object | None:
        """Return what a dotted name stands for, followed through the checkout's re-exports; None when it is not there."""
        if not dotted or hops > MAX_HOPS:
            return None
        if hops == 0 and dotted in self._objects:
            return self._objects[dotted]
        found = self._object(dotted, hops)
        if hops == 0:
            self._objects[dotted] = found
        return found

    def _object(self, dotted: str, hops: int) -> Object | None:
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            if name in self.modules:
                return self._in_module(self.modules[name], parts[length:], hops)
        if any(name == parts[0] or name.startswith(f"{parts[0]}.") for name in self.modules):
            return None
        for start, known in tables.ALIASES.items():
            if dotted.startswith(start):
                dotted = known + dotted[len(start) :]
        return Object("library", name=dotted)

    def _in_module(self, module: Module, rest: list[str], hops: int) -> Object | None:
        if not rest:
            return Object("module", module.name)
        head, *more = rest
        kind = module.top.get(head)
        if kind is not None:
            name = ".".join(rest)
            if not more:
                return Object(kind, module.name, head)
            if f"{module.name}:{name}" in self.functions:
                return Object("def", module.name, name)
            if kind == "class":
                member = self.member(f"{module.name}:{head}", more[0]) if len(more) == 1 else None
                if member is not None:
                    return Object("def", *member.split(":", 1))
                if f"{module.name}:{name}" in self.classes:
                    return Object("class", module.name, name)
                outside = self.library_base(f"{module.name}:{head}")
                return Object("library", name=".".join([outside, *more])) if outside else None
            return None
        target = module.scope.names.get(head)
        if target is not None and target != f"{module.name}.{head}":
            return self.object(".".join([target, *more]), hops + 1)
        if head in module.scope.bindings:
            return Object("var", module.name, head) if not more else None
        for star in module.stars:
            if star in self.modules and star != module.name:
                found = self._in_module(self.modules[star], rest, hops + 1) if hops < MAX_HOPS else None
                if found is not None:
                    return found
        return None

    # -- classes

    def bases(self, cls: str) -> list[Object]:
        """Return the bases of a class."""
        info = self.classes.get(cls)
        if info is None:
            return []
        found = [self.object(self.qualify(base, info.scope)) for base in info.node.bases]
        return [base for base in found if base is not None]

    def mro(self, cls: str) -> list[str]:
        """Return the class and its bases in the checkout, nearest first."""
        order: list[str] = []
        todo = [cls]
        while todo:
            one = todo.pop(0)
            if one in order or one not in self.classes:
                continue
            order.append(one)
            todo += [base.id for base in self.bases(one) if base.kind == "class"]
        return order

    def member(self, cls: str, name: str) -> str | None:
        """Return the id of the function that `name` is in a class or its bases."""
        key = (cls, name)
        if key not in self._members:
            self._members[key] = None  # a class that inherits from itself
            for one in self.mro(cls):
                if name in self.classes[one].methods:
                    self._members[key] = self.classes[one].methods[name]
                    break
        return self._members[key]

    def library_base(self, cls: str) -> str:
        """Return the first base of a class that is a library's, as a dotted name; "" when it has none."""
        for one in self.mro(cls):
            for base in self.bases(one):
                if base.kind == "library":
                    return base.name
        return ""

    def subclasses(self, cls: str) -> list[str]:
        """Return the classes of the checkout that inherit from a class, directly or not."""
        if self._subclasses is None:
            self._subclasses = {}
            for one in self.classes:
                for base in self.mro(one)[1:]:
                    self._subclasses.setdefault(base, []).append(one)
        return self._subclasses.get(cls, [])

    # -- types

    def type_of(self, node: ast.AST | None, scope: Scope, depth: int = 0) -> str | None:
        """Return the type of an expression; None when nothing is known."""
        if node is None or depth > MAX_HOPS:
            return None
        key = (id(node), "")
        if key in self._types:
            return self._types[key]
        self._types[key] = None  # an expression that depends on itself
        self._types[key] = found = self._type_of(node, scope, depth + 1)
        return found

    def _type_of(self, node: ast.AST, scope: Scope, depth: int) -> str | None:
        if isinstance(node, ast.Constant):
            return "plain" if node.value is not None else None
        if isinstance(node, (ast.JoinedStr, ast.Compare)):
            return "plain"
        if isinstance(node, ast.Name):
            return self._variable(node.id, scope, depth)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope, depth)
        if isinstance(node, ast.Call):
            return self._result(node, scope, depth)
        if isinstance(node, ast.Subscript):
            return element(self.type_of(node.value, scope, depth))
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return self._container(node.elts[:3], scope, depth)
        if isinstance(node, ast.Dict):
            return self._container(node.values[:3], scope, depth)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self._container([node.elt], scope, depth)
        if isinstance(node, ast.DictComp):
            return self._container([node.value], scope, depth)
        if isinstance(node, (ast.Await, ast.NamedExpr, ast.Starred)):
            return self.type_of(node.value, scope, depth)
        if isinstance(node, ast.IfExp):
            return self.type_of(node.body, scope, depth) or self.type_of(node.orelse, scope, depth)
        if isinstance(node, ast.BoolOp):
            return best([self.type_of(one, scope, depth) for one in node.values])
        if isinstance(node, ast.BinOp):
            left = self.type_of(node.left, scope, depth)
            return left if left in ("plain", "Path") or (left or "").startswith("[]") else None
        return None

    def _container(self, items: list[ast.expr], scope: Scope, depth: int) -> str:
        inner = best([self.type_of(item, scope, depth) for item in items])
        return "[]" + inner if inner is not None and inner != "plain" else "[]"

    def _variable(self, name: str, scope: Scope, depth: int) -> str | None:
        at: Scope | None = scope
        while at is not None:
            if name == at.self_name and at.owner:
                return f"@{at.owner}"
            if name in at.bindings or name in at.parameters:
                found = self._bound(at.bindings.get(name, []), depth)
                if found is None and at.parameters.get(name) is not None:
                    found = self._annotated(at.parameters[name], at, depth)
                return found or hint(name)
            if name in at.names:
                target = self.object(at.names[name])
                if target is not None and target.kind == "var":
                    home = self.modules[target.module].scope
                    return self._bound(home.bindings.get(target.name, []), depth) or hint(name)
                if target is not None and target.name == "sys.stdin":
                    return "Stdin"
                return None
            at = at.parent
        return hint(name)

    def _attribute(self, node: ast.Attribute, scope: Scope, depth: int) -> str | None:
        dotted = self.qualify(node, scope)
        if dotted:
            target = self.object(dotted)
            if target is not None and target.kind == "var":
                home = self.modules[target.module].scope
                return self._bound(home.bindings.get(target.name, []), depth) or hint(node.attr)
            if target is not None and target.name in ("sys.stdin", "sys.stdin.buffer"):
                return "Stdin"
            if target is not None:
                return None
        owner = self.type_of(node.value, scope, depth)
        if owner is not None and owner.startswith("@"):
            bindings: list[Binding] = []
            for one in self.mro(owner[1:]):
                bindings += self.classes[one].attributes.get(node.attr, [])
            found = self._bound(bindings, depth)
            if found is not None or self.member(owner[1:], node.attr) is not None:
                return found
        elif owner is not None:
            return tables.ATTRIBUTES.get((owner, node.attr)) if owner in tables.METHODS else hint(node.attr)
        return hint(node.attr)

    def _bound(self, bindings: list[Binding], depth: int) -> str | None:
        found: list[str | None] = []
        for binding in bindings[:20]:
            kind = self.type_of(binding.expression, binding.scope, depth)
            if binding.how == "annotation":
                kind = self._annotated(binding.expression, binding.scope, depth)
            elif binding.how == "element":
                kind = element(kind)
            elif binding.how == "adds":
                kind = f"[]{kind}" if kind and kind != "plain" else "[]"
            elif binding.how == "enter" and kind is not None and not kind.startswith("@"):
                kind = tables.RESULTS.get((kind, "__enter__"), kind)
            found.append(kind)
        return best(found)

    def _annotated(self, node: ast.expr | None, scope: Scope, depth: int) -> str | None:
        """Return the type that an annotation names: `Queue`, `Optional[Queue]`, `"Queue"`, `list[Future]`."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return None
        if depth > MAX_HOPS or node is None:
            return None
        if isinstance(node, ast.BinOp):
            return best([self._annotated(side, scope, depth + 1) for side in (node.left, node.right)])
        if isinstance(node, ast.Subscript):
            head = (self.qualify(node.value, scope) or "").split(".")[-1].lower()
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if head in ("optional", "union", "annotated", "type"):
                return best([self._annotated(one, scope, depth + 1) for one in inner])
            outer = self._annotated(node.value, scope, depth + 1)
            if outer is not None and outer != "[]":
                return outer
            if head in ("list", "dict", "set", "tuple", "sequence", "iterable", "deque", "mapping", "iterator"):
                found = best([self._annotated(one, scope, depth + 1) for one in inner])
                return f"[]{found}" if found and found != "plain" else "[]"
            return None
        target = self.object(self.qualify(node, scope))
        return self._instance(target)

    def _instance(self, target: Object | None) -> str | None:
        """Return the type of what calling `target` creates."""
        if target is None:
            return None
        if target.kind == "library":
            return tables.CONSTRUCTORS.get(target.name)
        if target.kind == "class":
            return f"@{target.id}"
        return None

    def outside_type(self, kind: str) -> str | None:
        """Return the type of the library's class that a class of the checkout inherits from: `Thread` for a `class W(Thread)`."""
        base = self.library_base(kind[1:])
        return tables.CONSTRUCTORS.get(base)

    def _result(self, node: ast.Call, scope: Scope, depth: int) -> str | None:
        target = self.object(self.qualify(node.func, scope))
        if target is not None and target.kind in ("library", "class"):
            made = self._instance(target)
            if made is not None:
                return made
        name = target.name if target is not None and target.kind == "library" else ""
        last = name.split(".")[-1]
        if last in PASS and node.args and (name.startswith("builtins.") or last == "tqdm"):
            kinds = [self.type_of(argument, scope, depth) for argument in node.args[:3]]
            return best(kinds)
        if name == "builtins.next" and node.args:
            return element(self.type_of(node.args[0], scope, depth))
        if name in ("builtins.open", "io.open"):
            return "plain"
        if name.startswith("torch.distributed.") and any(k.arg == "async_op" for k in node.keywords):
            return "Work"
        if name in ("torch.distributed.isend", "torch.distributed.irecv"):
            return "Work"
        if name in ("concurrent.futures.as_completed", "concurrent.futures.wait") and node.args:
            return "[]Future"
        if name in (
            "torch.jit.fork",
            "torch.futures.collect_all",
            "torch.distributed.rpc.rpc_async",
            "asyncio.ensure_future",
        ):
            return "Future"
        if target is not None and target.kind == "def":
            return self._returned(target, depth)
        if isinstance(node.func, ast.Attribute):
            return self._method_result(node, node.func, scope, depth)
        return None

    def _method_result(self, node: ast.Call, func: ast.Attribute, scope: Scope, depth: int) -> str | None:
        owner = self.type_of(func.value, scope, depth)
        if owner is not None and owner.startswith("[]"):
            if func.attr in ELEMENTS:
                return element(owner)
            return owner if func.attr in SAME else "plain"
        if owner is not None and owner.startswith("@"):
            member = self.member(owner[1:], func.attr)
            if member is not None:
                return self._returned(Object("def", *member.split(":", 1)), depth)
            owner = self.outside_type(owner)
        if owner is not None and (owner, func.attr) in tables.RESULTS:
            return tables.RESULTS[owner, func.attr]
        if owner == "plain":
            return "plain"
        if owner is None and func.attr == "submit":
            return "Future"
        return tables.ANY_RESULTS.get(func.attr)

    def _returned(self, target: Object, depth: int) -> str | None:
        """Return the type of what a function of the checkout returns."""
        node, scope = self.functions.get(target.id), self.scopes.get(target.id)
        if not isinstance(node, Def) or scope is None or depth > 8:
            return None
        found = self._annotated(node.returns, scope, depth) if node.returns is not None else None
        if found is not None:
            return found
        kinds = []
        for one in own_nodes(node):
            if isinstance(one, ast.Return) and one.value is not None:
                kinds.append(self.type_of(one.value, scope, depth + 1))
        return best(kinds)


class _Indexer:
    """Collects the names, classes, functions and bindings of one module."""

    def __init__(self, project: Project, module: Module) -> None:
        self.project, self.module = project, module

    def run(self) -> None:
        self.project.scopes[f"{self.module.name}:<module>"] = self.module.scope
        self.project.functions[f"{self.module.name}:<module>"] = self.module.tree
        self.block(self.module.tree, self.module.scope, "", "")

    def block(self, node: ast.AST, scope: Scope, prefix: str, owner: str) -> None:
        """Index what a module, class or function contains, without what its inner functions contain."""
        for one in own_nodes(node):
            if isinstance(one, Def):
                self.function(one, scope, prefix, owner)
            elif isinstance(one, ast.ClassDef):
                self.cls(one, scope, prefix)
            elif isinstance(one, ast.Import):
                for alias in one.names:
                    scope.names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(one, ast.ImportFrom):
                self.from_import(one, scope)
            else:
                self.bind(one, scope)

    def from_import(self, node: ast.ImportFrom, scope: Scope) -> None:
        origin = node.module or ""
        if node.level:
            package = self.module.name.split(".")
            package = package if self.module.package else package[:-1]
            base = package[: len(package) - (node.level - 1)]
            origin = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                self.module.stars.append(origin)
            else:
                scope.names[alias.asname or alias.name] = f"{origin}.{alias.name}"

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, prefix: str, owner: str) -> None:
        name = f"{prefix}{node.name}"
        key = f"{self.module.name}:{name}"
        inner = Scope(self.module, scope)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in [*arguments, *(a for a in (node.args.vararg, node.args.kwarg) if a)]:
            inner.parameters[argument.arg] = argument.annotation
        if owner:
            self.project.classes[owner].methods[node.name] = key
            self.project.method_names.setdefault(node.name, []).append(key)
            decorators = {ast.unparse(d) for d in node.decorator_list if isinstance(d, ast.Name)}
            if "staticmethod" not in decorators and arguments:
                inner.owner, inner.self_name = owner, arguments[0].arg
        else:
            scope.names[node.name] = f"{self.module.name}.{name}"
            if scope.parent is None:
                self.module.top[node.name] = "def"
        self.project.functions[key], self.project.scopes[key] = node, inner
        self.block(node, inner, f"{name}.", "")

    def cls(self, node: ast.ClassDef, scope: Scope, prefix: str) -> None:
        name = f"{prefix}{node.name}"
        key = f"{self.module.name}:{name}"
        self.project.classes[key] = Class(key, node, scope)
        scope.names[node.name] = f"{self.module.name}.{name}"
        if scope.parent is None and not prefix:
            self.module.top[node.name] = "class"
        body = Scope(self.module, scope)
        for one in own_nodes(node):
            if isinstance(one, Def):
                self.function(one, scope, f"{name}.", key)
            elif isinstance(one, ast.ClassDef):
                self.cls(one, scope, f"{name}.")
            else:
                self.bind(one, body, key)
        for attribute, bindings in body.bindings.items():
            self.project.classes[key].attributes.setdefault(attribute, []).extend(bindings)

    def bind(self, node: ast.AST, scope: Scope, cls: str = "") -> None:
        """Note the variables that a statement or an expression binds."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.target(target, "value", node.value, scope)
        elif isinstance(node, ast.AnnAssign):
            self.target(node.target, "annotation", node.annotation, scope)
            if node.value is not None:
                self.target(node.target, "value", node.value, scope)
        elif isinstance(node, ast.NamedExpr):
            self.target(node.target, "value", node.value, scope)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self.target(node.target, "element", node.iter, scope)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self.target(node.optional_vars, "enter", node.context_expr, scope)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("append", "add", "appendleft"):
                self.target(node.func.value, "adds", node.args[0], scope)
            elif node.func.attr == "setdefault" and len(node.args) > 1:
                self.target(node.func.value, "adds", node.args[1], scope)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            scope.bindings.setdefault(node.name, [])

    def target(self, target: ast.expr, how: str, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) and how == "value" else []
            for number, one in enumerate(target.elts):
                if len(values) == len(target.elts):
                    self.target(one, how, values[number], scope)
                else:
                    self.target(one, how, value, scope)
        elif isinstance(target, ast.Starred):
            self.target(target.value, how, value, scope)
        elif isinstance(target, ast.Name):
            if how != "adds" or target.id in scope.bindings:
                scope.bindings.setdefault(target.id, []).append(Binding(how, value, scope))
            else:
                self.outer(target.id, scope).bindings.setdefault(target.id, []).append(Binding(how, value, scope))
        elif isinstance(target, ast.Subscript):
            self.target(target.value, "adds", value, scope)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            at: Scope | None = scope
            while at is not None and target.value.id != at.self_name:
                at = at.parent
            if at is not None and at.owner in self.project.classes:
                attributes = self.project.classes[at.owner].attributes
                attributes.setdefault(target.attr, []).append(Binding(how, value, scope))

    def outer(self, name: str, scope: Scope) -> Scope:
        """Return the scope that a name is a variable of, seen from `scope`."""
        at: Scope | None = scope
        while at is not None:
            if name in at.bindings:
                return at
            at = at.parent
        return scope


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` in the order of the source, inner functions and classes as one node each."""
    todo = list(reversed(list(_children(node))))
    while todo:
        one = todo.pop()
        yield one
        if not isinstance(one, (*Def, ast.ClassDef)):
            todo += reversed(list(ast.iter_child_nodes(one)))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    body = getattr(node, "body", None)
    if isinstance(node, (*Def, ast.ClassDef, ast.Module)) and isinstance(body, list):
        yield from body
    else:
        yield from ast.iter_child_nodes(node)


def element(kind: str | None) -> str | None:
    """Return the type of what a container holds."""
    return kind[2:] or None if kind is not None and kind.startswith("[]") else None


def best(kinds: list[str | None]) -> str | None:
    """Return the type that says most: one that can wait before one that cannot, anything before nothing."""
    known = [kind for kind in kinds if kind is not None]
    return next((kind for kind in known if kind not in ("plain", "[]")), known[0] if known else None)


def hint(name: str) -> str | None:
    """Return the type that a variable's name suggests."""
    lowered = name.lower()
    return next((kind for pattern, kind in tables.HINTS if pattern.search(lowered)), None)


def python_files(folder: Path) -> list[Path]:
    """Return the Python files of a checkout that belong to it, in a fixed order. A link to a folder is not followed."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in tables.LEFT_OUT and not f.startswith("."))
        found += [Path(root, name) for name in sorted(files) if name.endswith(".py") and Path(root, name).is_file()]
    return found


def module_name(path: Path) -> str:
    """Return the name under which a file is imported: `src/` is on the import path."""
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" and len(parts) > 1 else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
