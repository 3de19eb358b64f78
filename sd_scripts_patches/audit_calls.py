"""The static call graph of a checkout: which functions a training script can reach, and on which thread.

It reaches too much rather than too little. A function that is named is reached. A method that is called on an object of
unknown type is reached in every class that reached code names, as in rapid type analysis; so are the special methods of such
a class and its `forward`. Flags of the command line are not followed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from sd_scripts_patches import audit_tables as tables
from sd_scripts_patches.audit_source import Project
from sd_scripts_patches.audit_waits import Function, Reference

CALLED_BY_OTHERS = ("forward", "backward", "run")
"""Methods that a library calls on an object: those of torch's modules and functions, and of a thread."""


@dataclass
class Graph:
    """calls: function → the functions that it can call; threads: function → those that it has another thread run."""

    calls: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    threads: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    reached: set[str] = field(default_factory=set)

    def reach(self, start: Iterable[str], barred: Collection[str] = (), threads: bool = True) -> set[str]:
        """Return what can be reached from `start`, without what only the functions in `barred` call."""
        found: set[str] = set()
        todo = list(start)
        while todo:
            one = todo.pop()
            if one in found:
                continue
            found.add(one)
            if one in barred:
                continue
            todo += self.calls.get(one, ())
            if threads:
                todo += self.threads.get(one, ())
        return found


def entries(project: Project) -> list[str]:
    """Return the ids of the main parts of the scripts that presets start."""
    files = {f"{folder}/{name}".strip("/") for folder in tables.SCRIPT_FOLDERS for name in tables.SCRIPTS}
    found = []
    for module in project.modules.values():
        if module.file in files:
            found += [f"{module.name}:<module>", f"{module.name}:<main>"]
    return found


def build(project: Project, functions: dict[str, Function]) -> Graph:
    """Return the graph of what the scripts of presets can reach."""
    builder = _Builder(project, functions)
    builder.run(entries(project))
    return builder.graph


class _Builder:
    def __init__(self, project: Project, functions: dict[str, Function]) -> None:
        self.project, self.functions = project, functions
        self.graph = Graph()
        self.todo: list[str] = []
        self.live: set[str] = set()  # classes that reached code names
        self.asked: dict[str, set[tuple[str, bool]]] = defaultdict(
            set
        )  # method → (function that calls it, on a thread)
        self.members: dict[str, set[tuple[str, str, bool]]] = defaultdict(set)  # class → (method, caller, thread)
        self.networks = {
            name for name, module in project.modules.items() if any(f in module.top for f in tables.CREATES_NETWORK)
        }

    def run(self, start: list[str]) -> None:
        for one in start:
            self.reach(one)
        while self.todo:
            function = self.functions[self.todo.pop()]
            for reference in sorted(function.references):
                self.follow(function, reference)

    def reach(self, one: str) -> None:
        if one in self.graph.reached or one not in self.functions:
            return
        self.graph.reached.add(one)
        self.todo.append(one)
        module = one.split(":")[0]
        self.edge(one, f"{module}:<module>", False)

    def edge(self, caller: str, callee: str, thread: bool) -> None:
        if callee not in self.functions or caller == callee:
            return
        (self.graph.threads if thread else self.graph.calls)[caller].add(callee)
        self.reach(callee)

    def follow(self, function: Function, reference: Reference) -> None:
        kind, name, owner, thread = reference
        if kind == "module":
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                self.edge(function.id, f"{'.'.join(parts[:length])}:<module>", False)
            if name == "importlib":
                for network in sorted(self.networks):
                    self.edge(function.id, f"{network}:<module>", False)
                    self.live_network(network, function.id)
        elif kind == "object":
            if name in self.project.classes:
                self.use(name, function.id, thread)
            else:
                self.edge(function.id, name, thread)
        elif kind == "super":
            for one in self.project.mro(owner)[1:]:
                if name in self.project.classes[one].methods:
                    self.edge(function.id, self.project.classes[one].methods[name], thread)
                    break
        elif kind == "member":
            self.member(owner, name, function.id, thread)
        elif kind == "method":
            self.asked[name].add((function.id, thread))
            for one in self.project.method_names.get(name, ()):
                if self.owner_is_live(one):
                    self.edge(function.id, one, thread)

    def live_network(self, network: str, caller: str) -> None:
        """A network module is imported by name: its functions are called as attributes of the module."""
        module = self.project.modules[network]
        for name, kind in module.top.items():
            if kind == "def":
                self.edge(caller, f"{network}:{name}", False)

    def use(self, cls: str, caller: str, thread: bool) -> None:
        """A class is named: it can be created, and its methods called by whoever calls a method of that name."""
        for one in self.project.mro(cls):
            for name, method in self.project.classes[one].methods.items():
                special = name.startswith("__") and name.endswith("__")
                if special or name in CALLED_BY_OTHERS:
                    self.edge(caller, self.project.member(cls, name) or method, thread and name != "__init__")
        if cls in self.live:
            return
        family = self.project.mro(cls)
        self.live.update(family)
        for one in family:
            for name, method in self.project.classes[one].methods.items():
                for caller_id, on_thread in list(self.asked.get(name, ())):
                    self.edge(caller_id, method, on_thread)
                for base in family:
                    for asked, caller_id, on_thread in list(self.members.get(base, ())):
                        if asked == name:
                            self.edge(caller_id, method, on_thread)

    def owner_is_live(self, method: str) -> bool:
        module, name = method.split(":", 1)
        return f"{module}:{name.rpartition('.')[0]}" in self.live

    def member(self, cls: str, name: str, caller: str, thread: bool) -> None:
        """A method is called on an object of a known class, or of one that inherits from it."""
        self.members[cls].add((name, caller, thread))
        found = self.project.member(cls, name)
        if found is not None:
            self.edge(caller, found, thread)
        for sub in self.project.subclasses(cls):
            if sub in self.live and name in self.project.classes[sub].methods:
                self.edge(caller, self.project.classes[sub].methods[name], thread)
