"""Finds the waits of a module, and what each of its functions refers to (for the call graph).

A call is judged by what its name resolves to (a function of a library, in the tables), else by the type of the object it is
called on, else by the method's name alone. What resolves to a function of the checkout is no wait: the waits inside it are
listed there. Not listed are the waits that no call shows: `tensor.item()` and every other read of a GPU's result, and code
that computes for ever.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sd_scripts_patches import audit_tables as tables
from sd_scripts_patches.audit_source import Def, Module, Object, Project, Scope
from sd_scripts_patches.audit_tables import NEVER, Call

CALL_LENGTH = 60


@dataclass(frozen=True)
class Wait:
    """One wait. own: what bounds it at the call itself (`timeout=30`), "" when nothing does."""

    file: str
    line: int
    module: str
    function: str
    kind: str
    call: str
    own: str = ""


class Reference(NamedTuple):
    """What a function refers to. kind: object (id) | member (of the class `owner`) | super | method (of any class) | module.

    thread: another thread or process runs it.
    """

    kind: str
    name: str
    owner: str = ""
    thread: bool = False


@dataclass
class Function:
    """A function, or the statements of a module (`<module>`) or of its `if __name__ == "__main__":` (`<main>`)."""

    module: Module
    name: str
    owner: str = ""  # id of the class whose method this is, or is inside of
    waits: list[Wait] = field(default_factory=list)
    references: set[Reference] = field(default_factory=set)

    @property
    def id(self) -> str:
        return f"{self.module.name}:{self.name}"


def scan(project: Project) -> dict[str, Function]:
    """Return every function of the project with its waits and references. A module that cannot be judged is removed."""
    found: dict[str, Function] = {}
    for module in list(project.modules.values()):
        scanner = _Scanner(project, module)
        try:
            scanner.run()
        except RecursionError:
            project.drop(module, "nested too deeply")
            continue
        found.update(scanner.functions)
    return found


class _Scanner:
    def __init__(self, project: Project, module: Module) -> None:
        self.project, self.module = project, module
        self.functions: dict[str, Function] = {}
        self.at = self.enter("<module>", "")
        self.scope: Scope = module.scope
        self.thread = False  # inside what another thread runs
        self.limit = ""  # the limit that surrounds the statement (`async with asyncio.timeout(…)`)
        self.managed: set[int] = set()  # calls of constructors whose object a `with` ends
        self.listed: set[int] = set()  # calls that are listed already
        self.body_of = ""  # the class of whose body this statement is a part

    def enter(self, name: str, owner: str) -> Function:
        function = Function(self.module, name, owner)
        return self.functions.setdefault(function.id, function)

    def run(self) -> None:
        for node in self.module.tree.body:
            if isinstance(node, ast.If) and _is_main(node.test):
                before, self.at = self.at, self.enter("<main>", "")
                self.many(node.body)
                self.at = before
                self.many(node.orelse)
            else:
                self.visit(node)

    # -- the walk

    def many(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit(self, node: ast.AST) -> None:
        method = getattr(self, f"on_{type(node).__name__}", None)
        if method is not None:
            method(node)
        else:
            self.many(list(ast.iter_child_nodes(node)))

    def on_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.function(node, "")

    def on_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.function(node, "")

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str, prefix: str | None = None) -> None:
        arguments = node.args
        self.many(node.decorator_list)
        self.many([d for d in [*arguments.defaults, *arguments.kw_defaults] if d is not None])
        top = self.at.name in ("<module>", "<main>")
        name = f"{prefix}{node.name}" if prefix is not None else node.name if top else f"{self.at.name}.{node.name}"
        key = f"{self.module.name}:{name}"
        if prefix is None and not top and node.decorator_list:
            self.refer("object", key)  # a decorator registers it
        scope = self.project.scopes.get(key)
        if scope is None:
            return
        before = self.at, self.scope, self.limit, self.thread
        self.at, self.scope, self.limit, self.thread = self.enter(name, owner or self.at.owner), scope, "", False
        self.many(node.body)
        self.at, self.scope, self.limit, self.thread = before

    def on_ClassDef(self, node: ast.ClassDef, prefix: str = "") -> None:
        self.many([*node.decorator_list, *node.bases, *(k.value for k in node.keywords)])
        top = self.at.name in ("<module>", "<main>")
        name = f"{prefix}{node.name}" if prefix or top else f"{self.at.name}.{node.name}"
        for one in node.body:
            if isinstance(one, Def):
                self.function(one, f"{self.module.name}:{name}", f"{name}.")
            elif isinstance(one, ast.ClassDef):
                self.on_ClassDef(one, f"{name}.")
            else:
                before, self.body_of = self.body_of, f"{self.module.name}:{name}"
                self.visit(one)
                self.body_of = before

    def on_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.refer("module", alias.name)

    def on_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            origin = self.scope_name(alias.asname or alias.name) if alias.name != "*" else ""
            self.refer("module", origin.rsplit(".", 1)[0] if origin else node.module or "")
            self.refer("module", origin)
        if any(alias.name == "*" for alias in node.names):
            for star in self.module.stars:
                self.refer("module", star)

    def scope_name(self, name: str) -> str:
        at: Scope | None = self.scope
        while at is not None:
            if name in at.names:
                return at.names[name]
            at = at.parent
        return ""

    def on_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            methods = self.project.classes[self.body_of].methods if self.body_of in self.project.classes else {}
            if node.id in methods:
                self.refer("object", methods[node.id])
            self.refer_to(self.resolve(node))

    def on_Attribute(self, node: ast.Attribute) -> None:
        target = self.resolve(node)
        if target is not None:
            self.refer_to(target)
            if target.kind != "library":
                self.refer_heads(node.value)
            return
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super" and self.at.owner:
            self.refer("super", node.attr, self.at.owner)
        else:
            kind = self.type(node.value)
            if self.is_self(node.value) and kind is not None and kind.startswith("@"):
                self.refer("member", node.attr, kind[1:])
            elif not isinstance(node.value, (ast.Constant, ast.JoinedStr)):
                self.refer("method", node.attr)  # of whatever class: a type that is known is one of those it can have
        self.visit(node.value)

    def is_self(self, node: ast.AST) -> bool:
        """Whether an expression is the object whose method this is."""
        at: Scope | None = self.scope
        while at is not None and isinstance(node, ast.Name):
            if at.self_name:
                return node.id == at.self_name
            at = at.parent
        return False

    def refer_heads(self, node: ast.AST) -> None:
        """Refer to the class or the module before a dotted name's last part."""
        self.refer_to(self.resolve(node))

    def on_While(self, node: ast.While) -> None:
        self.polling(node)
        self.many([node.test, *node.body, *node.orelse])

    def on_For(self, node: ast.For) -> None:
        self.loop(node)

    def on_AsyncFor(self, node: ast.AsyncFor) -> None:
        if not self.resolves_here(node.iter):
            self.add(node, "async", f"async for … in {_text(node.iter)}")
        self.loop(node)

    def loop(self, node: ast.For | ast.AsyncFor) -> None:
        kind = self.type(node.iter)
        spec = tables.METHODS.get(kind or "", {}).get("__iter__")
        words = {n.id for n in ast.walk(node.iter) if isinstance(n, ast.Name)}
        words |= {n.attr for n in ast.walk(node.iter) if isinstance(n, ast.Attribute)}
        if spec is not None:
            self.add(node, spec.kind, f"for … in {_text(node.iter)}")
        elif tables.SAMPLERS.search(self.at.name.split(".")[-1].lower()) and any("timesteps" in w for w in words):
            self.add(node, "sampling", f"for … in {_text(node.iter)}")
        self.many([node.iter, *node.body, *node.orelse])

    def on_With(self, node: ast.With | ast.AsyncWith) -> None:
        before = self.limit
        for item in node.items:
            self.context(item.context_expr)
            self.visit(item.context_expr)
            call = item.context_expr
            if isinstance(call, ast.Call):
                target = self.resolve(call.func)
                if target is not None and target.name in tables.ASYNC_LIMITS and not _none(call.args):
                    self.limit = f"{target.name}({_text(call.args[0]) if call.args else ''})"
        self.many(node.body)
        self.limit = before

    on_AsyncWith = on_With

    def context(self, node: ast.expr) -> None:
        """List what `with node:` waits for when it begins or ends."""
        kind = self.type(node)
        methods = self.methods(kind)
        if isinstance(node, ast.Call):
            self.managed.add(id(node))
        spec = methods.get("__enter__") or methods.get("__exit__")
        if spec is not None:
            own = self.own(node, replace(spec, at=NEVER)) if isinstance(node, ast.Call) else ""
            self.add(node, spec.kind, f"with {_text(node)}", own or "")

    def on_Await(self, node: ast.Await) -> None:
        call = node.value
        if not isinstance(call, ast.Call):
            if not self.resolves_here(call):
                self.add(node, "async", f"await {_text(call)}")
            self.visit(call)
            return
        target = self.resolve(call.func)
        name = target.name if target is not None and target.kind == "library" else ""
        if name in tables.ASYNC_LIMITS:
            limits = [*call.args[1:2], *(k.value for k in call.keywords if k.arg in tables.TIMEOUT_WORDS)]
            before = self.limit
            self.limit = self.limit or (f"{name}(…, {_text(limits[0])})" if limits and not _none(limits) else "")
            if call.args and not isinstance(call.args[0], ast.Call):
                self.add(node, "async", f"await {_text(call)}")
            self.many(call.args)
            self.limit = before
            return
        if name not in tables.SLEEPS and self.find(call) is None and not self.resolves_here(call.func):
            self.add(node, "async", f"await {_text(call)}")
        self.visit(call)

    def resolves_here(self, node: ast.AST) -> bool:
        """Whether an expression is a function or class of the checkout: its waits are listed inside it."""
        node = node.func if isinstance(node, ast.Call) else node
        target = self.resolve(node)
        if target is not None:
            return target.kind in ("def", "class")
        if isinstance(node, ast.Attribute):
            kind = self.type(node.value)
            return kind is not None and kind.startswith("@") and self.project.member(kind[1:], node.attr) is not None
        return False

    def on_Call(self, node: ast.Call) -> None:
        found = self.find(node)
        if found is not None and id(node) not in self.listed:
            self.listed.add(id(node))
            self.add(node, *found)
        name = getattr(node.func, "id", "")
        if name in ("getattr", "hasattr") and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            self.refer("method", str(node.args[1].value))
        self.visit(node.func)
        started = self.started(node)
        for argument in [*node.args, *(k.value for k in node.keywords)]:
            before = self.thread
            self.thread = before or argument is started
            self.visit(argument)
            self.thread = before

    def started(self, node: ast.Call) -> ast.expr | None:
        """Return the argument of a call that another thread or process runs."""
        target = self.resolve(node.func)
        if target is not None and target.kind == "library":
            kind = tables.CONSTRUCTORS.get(target.name)
            if kind in ("Thread", "Process"):
                named = [k.value for k in node.keywords if k.arg in ("target", "function")]
                return next(iter([*named, *node.args[1:2]]), None)
            return None
        if isinstance(node.func, ast.Attribute) and node.func.attr in tables.THREAD_STARTERS and node.args:
            kind = self.type(node.func.value)
            if kind in ("Executor", "Pool", "Loop") or (kind is None and node.func.attr in ("submit", "apply_async")):
                return node.args[1 if kind == "Loop" and len(node.args) > 1 else 0]
        return None

    # -- waits

    def find(self, node: ast.Call) -> tuple[str, str, str] | None:
        """Return (kind, call, own limit) when a call waits."""
        target = self.resolve(node.func)
        if target is not None and target.kind == "library":
            return self.library_call(node, target.name)
        if target is not None:
            spec = tables.BY_NAME.get(target.name) if target.kind == "class" else None
            return self.finding(node, spec)
        if not isinstance(node.func, ast.Attribute):
            spec = tables.BY_NAME.get(getattr(node.func, "id", ""))
            return self.finding(node, spec)
        name, kind = node.func.attr, self.type(node.func.value)
        if isinstance(node.func.value, ast.Call) and getattr(node.func.value.func, "id", "") == "super":
            if self.at.owner and any(
                name in self.project.classes[c].methods for c in self.project.mro(self.at.owner)[1:]
            ):
                return None
            return self.finding(node, self.methods(f"@{self.at.owner}").get(name) if self.at.owner else None)
        if kind is not None and kind.startswith("@"):
            if self.project.member(kind[1:], name) is not None:
                return None
            outside = self.project.outside_type(kind)
            if outside is not None:
                return self.finding(node, self.methods(kind).get(name))
            if self.project.library_base(kind[1:]) == "":
                return None if name not in tables.UNKNOWN else self.by_name(node, name)
            return self.by_name(node, name)
        if kind == "HfApi":
            return self.finding(node, Call("hub"))
        if kind is not None:
            return self.finding(node, self.methods(kind).get(name))
        return self.by_name(node, name)

    def library_call(self, node: ast.Call, name: str) -> tuple[str, str, str] | None:
        """Judge a call of a function or class of a library."""
        last = name.rsplit(".", 1)[-1]
        if name in ("builtins.open", "io.open"):
            return self.finding(node, Call("save" if _writes(node) else "file"))
        made = tables.CONSTRUCTORS.get(name)
        if made == "DataLoader":
            return self.finding(node, Call("dataloader"))
        if made in ("Executor", "Thread", "Process"):
            if id(node) in self.managed or self.daemon(node):
                return None
            return "exit", f"{_text(node.func)}(…)", ""
        spec = tables.FUNCTIONS.get(name)
        for start, (call, exceptions) in tables.PREFIXES.items():
            rest = name[len(start) :].split(".")
            if spec is None and name.startswith(start) and rest[0] not in exceptions and rest[-1][:1].islower():
                spec = call
        if spec is None and made is None:
            if (
                last in tables.UNKNOWN
                and not name.startswith(tables.LOCAL)
                and tables.UNKNOWN[last].kind in ("hub", "collective", "server", "async")
            ):
                spec = tables.UNKNOWN[last]
            elif _says_wait(last) and not name.startswith("builtins."):
                spec = Call("sync")
        return self.finding(node, spec)

    def by_name(self, node: ast.Call, name: str) -> tuple[str, str, str] | None:
        """Judge a method of an object about which nothing is known."""
        spec = tables.UNKNOWN.get(name)
        plain = [k for k in node.keywords if k.arg not in tables.TIMEOUT_WORDS | tables.NON_BLOCKING]
        if spec is not None and spec.kind in ("future", "event") and (len(node.args) > 1 or plain):
            spec = None
        if spec is None and name in tables.NO_ARGUMENT and not plain:
            first = node.args[0] if len(node.args) == 1 else None
            number = isinstance(first, ast.Constant) and isinstance(first.value, (int, float))
            if not node.args or (name == "join" and number):
                spec = tables.NO_ARGUMENT[name]
        if spec is None and _says_wait(name) and name not in self.project.method_names:
            spec = Call("sync")
        return self.finding(node, spec)

    def finding(self, node: ast.Call, spec: Call | None) -> tuple[str, str, str] | None:
        own = self.own(node, spec) if spec is not None else None
        if spec is None or own is None:
            return None
        last = _text(node.func).rsplit(".", 1)[-1]
        if last == "prepare" and node.args and all(tables.ALONE.search(_text(one).lower()) for one in node.args):
            return None
        if spec.kind == "file" and _writes(node):
            spec = Call("save", spec.at, spec.default)
        if spec.kind == "hub" and any(
            k.arg == "local_files_only" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in node.keywords
        ):
            spec = Call("file")
        return spec.kind, f"{_text(node.func)}({'' if not node.args and not node.keywords else '…'})", own

    def own(self, node: ast.Call, spec: Call) -> str | None:
        """Return the limit that a call gives itself, "" when it gives none, None when it does not wait at all."""
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
            if keyword.arg in tables.NON_BLOCKING and value is False:
                return None
            if keyword.arg == "async_op" and value is True:
                return None
            if (
                keyword.arg in tables.TIMEOUT_WORDS
                and value is not None
                and not (spec.kind == "dataloader" and value == 0)
            ):
                return f"{keyword.arg}={_text(keyword.value)}"
        first = node.args[0] if node.args else None
        last = _text(node.func).rsplit(".", 1)[-1]
        if last in ("acquire", "get", "shutdown") and isinstance(first, ast.Constant) and first.value is False:
            return None
        if (
            last == "put"
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and node.args[1].value is False
        ):
            return None
        if last == "put" and spec.kind == "queue" and self.unbounded(node.func):
            return None
        if last == "waitKey" and isinstance(first, ast.Constant) and isinstance(first.value, int) and first.value <= 0:
            return ""
        if last in ("waitpid", "wait4", "waitid") and any("WNOHANG" in _text(a) for a in node.args):
            return None
        if last in ("flock", "lockf") and any("LOCK_NB" in _text(a) or "LOCK_UN" in _text(a) for a in node.args):
            return None
        if spec.at != NEVER and len(node.args) > spec.at and not any(isinstance(a, ast.Starred) for a in node.args):
            given = node.args[spec.at]
            constant = given.value if isinstance(given, ast.Constant) else 0
            if constant is not None and not isinstance(given, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
                return f"timeout {_text(given)}"
        if spec.kind == "socket" and self.has_settimeout(node.func):
            return "settimeout"
        if spec.default == "0":
            return None  # without a time it does not wait
        return spec.default

    def unbounded(self, func: ast.expr) -> bool:
        """Whether `func` puts into a queue that is made without a size."""
        if not isinstance(func, ast.Attribute):
            return False
        made = self.made_by(func.value)
        return bool(made) and all(not call.args and not call.keywords for call in made)

    def made_by(self, node: ast.expr) -> list[ast.Call]:
        """Return the constructor calls that a variable or an attribute gets its value from."""
        bindings = []
        if isinstance(node, ast.NamedExpr):
            node = node.value
        if isinstance(node, ast.Call):
            return [node]
        if isinstance(node, ast.Name):
            at: Scope | None = self.scope
            while at is not None and node.id not in at.bindings:
                at = at.parent
            bindings = at.bindings[node.id] if at is not None else []
        elif isinstance(node, ast.Attribute):
            owner = self.type(node.value) or ""
            for one in self.project.mro(owner[1:]) if owner.startswith("@") else []:
                bindings += self.project.classes[one].attributes.get(node.attr, [])
        return [b.expression for b in bindings if b.how == "value" and isinstance(b.expression, ast.Call)]

    def has_settimeout(self, func: ast.expr) -> bool:
        """Whether the function sets a timeout on the socket that `func` is a method of."""
        if not isinstance(func, ast.Attribute):
            return False
        definition = self.project.functions.get(self.at.id)
        for node in ast.walk(definition) if definition is not None else ():
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "settimeout"
                and ast.dump(node.func.value) == ast.dump(func.value)
                and not _none(node.args)
            ):
                return True
        return False

    def daemon(self, node: ast.Call) -> bool:
        """Whether a thread or process is a daemon, which the interpreter does not join."""
        if any(
            k.arg == "daemon" and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords
        ):
            return True
        definition = self.project.functions.get(self.at.id)
        for one in ast.walk(definition) if definition is not None else ():
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant) and one.value.value is True:
                daemons = [t for t in one.targets if isinstance(t, ast.Attribute) and t.attr == "daemon"]
                if daemons:
                    return True
        return False

    def polling(self, node: ast.While) -> None:
        """List a loop that sleeps and asks again, or asks without a pause."""
        inside = list(_loop_nodes(node))
        sleeps = any(isinstance(n, ast.Call) and self.is_sleep(n) for n in inside)
        test = list(ast.walk(node.test))
        asks = any(
            isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in tables.POLLS and not n.args
            for n in test
        ) or any(isinstance(n, ast.Call) and self.is_path_test(n) for n in test)
        if not sleeps and not asks:
            return
        if asks and not sleeps and any(isinstance(n, (ast.Call, ast.Await)) and n not in test for n in inside):
            busy = [n for n in inside if isinstance(n, ast.Call) and n not in test]
            if not all(self.is_trivial(n) for n in busy):
                return  # the loop works off what it asks for: `while not queue.empty(): handle(queue.get())`
        limits = [node.test, *(n.test for n in inside if isinstance(n, ast.If) and _leaves(n))]
        own = next((f"{_text(limit)}" for limit in limits if self.is_limit(limit)), "")
        self.add(node, "polling", f"while {_text(node.test)}", own)

    def is_sleep(self, node: ast.Call) -> bool:
        target = self.resolve(node.func)
        if target is not None:
            return target.name in tables.SLEEPS
        return isinstance(node.func, ast.Attribute) and node.func.attr == "sleep"

    def is_path_test(self, node: ast.Call) -> bool:
        target = self.resolve(node.func)
        return target is not None and target.name in (
            "os.path.exists",
            "os.path.isfile",
            "os.path.getsize",
            "builtins.all",
        )

    def is_trivial(self, node: ast.Call) -> bool:
        target = self.resolve(node.func)
        return target is not None and target.name in (
            "builtins.print",
            "builtins.len",
            "os.sched_yield",
            *tables.CLOCKS,
        )

    def is_limit(self, test: ast.expr) -> bool:
        """Whether a condition compares with a clock or a count of attempts."""
        for node in ast.walk(test):
            if isinstance(node, ast.Call):
                target = self.resolve(node.func)
                if target is not None and target.name in tables.CLOCKS:
                    return True
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name and tables.LIMIT_NAMES.search(name.lower()) and isinstance(test, (ast.Compare, ast.BoolOp)):
                return True
        return False

    # -- helpers

    def add(self, node: ast.AST, kind: str, call: str, own: str = "") -> None:
        line = getattr(node, "lineno", 0)
        self.at.waits.append(
            Wait(self.module.file, line, self.module.name, self.at.name, kind, call, own or self.limit)
        )

    def resolve(self, node: ast.AST) -> Object | None:
        return self.project.object(self.project.qualify(node, self.scope))

    def type(self, node: ast.AST) -> str | None:
        return self.project.type_of(node, self.scope)

    def methods(self, kind: str | None) -> dict[str, Call]:
        """Return the waiting methods of a type; of a class of the checkout, those of the library's class it inherits from."""
        if kind is not None and kind.startswith("@"):
            outside = self.project.outside_type(kind) or ""
            found = tables.METHODS.get(outside, {})
            return {n: c for n, c in found.items() if self.project.member(kind[1:], n) is None}
        return tables.METHODS.get(kind or "", {})

    def refer(self, kind: str, name: str, owner: str = "") -> None:
        if name:
            self.at.references.add(Reference(kind, name, owner, self.thread))

    def refer_to(self, target: Object | None) -> None:
        if target is not None and target.kind in ("def", "class"):
            self.refer("object", target.id)
        elif target is not None and target.kind in ("module", "var"):
            self.refer("module", target.module)


def _is_main(test: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(test))


def _says_wait(name: str) -> bool:
    """Whether a function's name has a word for waiting: `recv_json`, `nvmlEventSetWait`. That of a class does not count."""
    if not name.strip("_")[:1].islower() or name in tables.VERBLESS:
        return False
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").split("_")
    return bool(tables.VERBS.intersection(words)) and words[0] not in ("is", "has", "set", "get")


def _writes(node: ast.Call) -> bool:
    modes = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
    return any(isinstance(m, ast.Constant) and isinstance(m.value, str) and set(m.value) & set("wax") for m in modes)


def _none(nodes: Sequence[ast.expr]) -> bool:
    return any(isinstance(n, ast.Constant) and n.value is None for n in nodes)


def _leaves(node: ast.If) -> bool:
    """Whether an `if` leaves the loop around it."""
    return any(isinstance(n, (ast.Break, ast.Raise, ast.Return)) for one in node.body for n in ast.walk(one))


def _loop_nodes(node: ast.While) -> list[ast.AST]:
    """Return the nodes of a loop's body, without those of functions defined in it."""
    found: list[ast.AST] = []
    todo: list[ast.AST] = [*node.body]
    while todo:
        one = todo.pop()
        found.append(one)
        if not isinstance(one, (*Def, ast.ClassDef, ast.Lambda)):
            todo += ast.iter_child_nodes(one)
    return found


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= CALL_LENGTH else text[: CALL_LENGTH - 1] + "…"
