"""`python tests/support/audit_waits.py CHECKOUT [--against OTHER]`: the waits in kohya's trainers, and what ends each.

For those who maintain the patches: after an update of a trainer it names the new waits, and exits with 1 while one is
open. It reads the source of the scripts that presets start and of every module that they import; nothing is imported.
data/wait_rules.tsv says which calls wait, COVERS which patch (sd_scripts_patches/registry.py) ends which of them: a
patch counts only where its targets are in this checkout. What no patch names on the main thread is ended by the phase
limit (guards/phase_limit.py). A wait of another thread is ended by what ends the wait for that thread in the same file;
with none, it is open.

It lists too much rather than too little: a listed function may never run. Not listed are waits that no call shows, such
as `tensor.item()`. A function counts as one of another thread when its name is used only to start threads; where a name
is used for two functions, one on the main thread is enough for both.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sd_scripts_patches import compatibility, locate, registry  # noqa: E402
from sd_scripts_patches.patch import Incompatible, Patch  # noqa: E402

OWN, PHASE, OPEN = "own timeout", "phase limit", "open"


@dataclass(frozen=True)
class Rule:
    """Calls that wait: a row of data/wait_rules.tsv."""

    kind: str
    calls: str
    at: int | None = None
    bare: bool = False


def rules() -> tuple[Rule, ...]:
    """The rows of data/wait_rules.tsv. A call of the checkout's own function is none: the waits in it are listed there."""
    lines = (Path(__file__).with_name("data") / "wait_rules.tsv").read_text(encoding="utf-8").splitlines()
    rows = [[*line.split("\t"), "", ""] for line in lines if not line.startswith("#")]
    return tuple(Rule(kind, calls, int(at) if at else None, bool(bare)) for kind, calls, at, bare, *_ in rows)


RULES = rules()
LOADERS = re.compile(r"data_?loader\w*", re.IGNORECASE)
"""A `for` over an object with such a name waits for the batches of a data loader."""
SAMPLERS = re.compile(r"denoise|sample|infer|generate|__call__")
"""A `for` over timesteps in a function with such a name makes a sample image."""
POLLED = {"done", "is_alive", "poll", "empty", "query"}
"""A `while` that sleeps, or asks for one of these, waits until the answer changes."""
TIMEOUT_WORDS = {"timeout", "timeout_s", "timeout_ms", "max_wait"}
STARTERS = set(
    ["submit", "map", "apply_async", "map_async", "starmap", "imap", "run_in_executor", "Thread", "Process", "Timer"]
)
"""Calls that run a function, given by name, on another thread."""
JOINS = ("future", "thread", "queue", "event", "polling", "async")
"""Kinds of waits by which one thread waits for another."""


INSIDE, MODULE, ANYWHERE = "inside", "module", "anywhere"


@dataclass(frozen=True)
class Cover:
    """What a patch ends: the waits of `kind` whose call matches `calls`, both for the whole name.

    where: INSIDE the functions that its `targets` name (a deadline is around them); in the MODULE of such a target;
    ANYWHERE, because the library's function that waits is the target.
    """

    patch: str
    where: str
    kind: str = ".*"
    calls: str = ".*"
    targets: str = ".*"


COVERS = (
    Cover("block_swap", INSIDE),
    Cover("images", INSIDE, targets=r"load_image|BaseDataset\.get_image_size"),
    Cover("caches", INSIDE, targets=r"\w+Datasource\.(get_image_data|get_caption)"),
    Cover("sampling", INSIDE, targets=r"(.*\.)?_?sample_image_inference"),
    Cover("hub", INSIDE, targets=r"upload|list_dir|exists_repo|fire_in_thread"),
    Cover("hygiene", INSIDE, targets=r"get_git_revision_hash"),
    Cover("trackers", INSIDE, targets=r"init_trackers"),
    Cover("npz", ANYWHERE, kind="file", calls=r"numpy\.load"),
    Cover("caches", MODULE, kind="file", calls=r".*\.load_file", targets="load_file"),
    # The tasks of the pool that reads images for caching are calls of load_image.
    Cover("images", MODULE, kind="future", targets=r"BaseDataset\.get_image_size"),
    Cover("dataloader", ANYWHERE, kind="dataloader"),
    Cover("sampling", ANYWHERE, kind="sampling"),
    Cover("trackers", ANYWHERE, kind="tracker", calls=r".*\.(log|log_images|init_trackers|login)"),
    Cover("save", ANYWHERE, kind="tracker", calls=r".*\.end_training"),
    Cover("hub", ANYWHERE, kind="hub", calls=r".*(hf_hub_download|snapshot_download|from_pretrained|from_single_file)"),
    Cover("barrier", ANYWHERE, kind="collective", calls=r".*wait_for_everyone"),
    Cover("exit", ANYWHERE, kind="exit"),
)
"""The first row that matches decides."""


@dataclass
class Wait:
    """One wait. by: the patch that ends it, or OWN, PHASE or OPEN; "" until it is known."""

    file: str
    line: int
    function: str
    kind: str
    call: str
    name: str  # of the call, with imports resolved
    by: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What stays the same when code moves to another file or class."""
        return self.function.rpartition(".")[2], self.kind, self.call


@dataclass
class Report:
    """unread: file → why it could not be judged. Its waits are unknown."""

    waits: list[Wait] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def open(self) -> list[Wait]:
        return [wait for wait in self.waits if wait.by == OPEN]


# -- which files a run reads


def started() -> set[str]:
    """The scripts and the network modules that the presets name: `zimage_train_network.py`, `networks.lora_flux`."""
    found: set[str] = set()
    for path in (ROOT / "presets/families").glob("*.toml"):
        found.update(re.findall(r'"(\w+\.py|(?:\w+\.)*networks\.\w+)"', path.read_text(encoding="utf-8")))
    return found


def files(source: Path, unread: dict[str, str]) -> dict[str, tuple[Path, ast.Module]]:
    """Module → its file and tree: what presets start, and what that imports."""
    named = [name.removesuffix(".py") for name in sorted(started())]
    todo = [f"{package}{name}" for name in named for package in ("", "musubi_tuner.")]
    found: dict[str, tuple[Path, ast.Module]] = {}
    while todo:
        module = todo.pop()
        path = locate.find_source(module, source)
        if module in found or path is None or not path.is_relative_to(source):
            continue
        try:
            found[module] = path, locate.parse(path)
        except Incompatible as error:
            unread[path.relative_to(source).as_posix()] = str(error)
            continue
        for name in imports(found[module][1], module, path.name == "__init__.py").values():
            todo += [name, name.rpartition(".")[0]]
    return found


def imports(tree: ast.Module, module: str, package: bool) -> dict[str, str]:
    """Name in a module → what it stands for, dotted."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.split(".")[0]
                found[alias.asname or head] = alias.name if alias.asname else head
                found.setdefault(f" {alias.name}", alias.name)  # `import a.b`: no name stands for it
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -(node.level - package)] if node.level > package else module.split(".")
            start = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
            found.update({alias.asname or alias.name: f"{start}.{alias.name}" for alias in node.names})
    return found


# -- the waits of one file


class Scanner(ast.NodeVisitor):
    """Lists the waits of a module, and which names each function uses.

    uses: function → the names that it uses; started: the names of functions that are given to a starter of threads.
    """

    def __init__(self, file: str, names: dict[str, str], own: set[str], methods: set[str]) -> None:
        self.file, self.names, self.own, self.methods = file, names, own, methods
        self.waits: list[Wait] = []
        self.uses: dict[str, set[str]] = {"": set()}
        self.started: set[str] = set()
        self.at = ""
        self.managed: set[ast.AST] = set()
        self.starting = False

    def dotted(self, node: ast.expr) -> str:
        """The name of an expression with its imports resolved."""
        text = " ".join(ast.unparse(node).split())
        head, dot, rest = text.partition(".")
        return f"{self.names.get(head, head)}{dot}{rest}"

    def add(self, node: ast.stmt | ast.expr, kind: str, call: str, name: str = "", by: str = "") -> None:
        self.waits.append(Wait(self.file, node.lineno, self.at, kind, call[:70], name or call, by))

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        before, self.at = self.at, f"{self.at}.{node.name}".strip(".")
        self.uses.setdefault(self.at, set())
        self.generic_visit(node)
        self.at = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = definition

    def visit_Name(self, node: ast.Name) -> None:
        (self.started if self.starting else self.uses[self.at]).add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        (self.started if self.starting else self.uses[self.at]).add(node.attr)
        before, self.starting = self.starting, False
        self.visit(node.value)
        self.starting = before

    def visit_With(self, node: ast.With) -> None:
        self.managed.update(item.context_expr for item in node.items)
        for item in node.items:
            if isinstance(item.context_expr, ast.Call) and self.dotted(item.context_expr.func).endswith("PoolExecutor"):
                self.add(node, "future", f"with {ast.unparse(item.context_expr)}")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        text = ast.unparse(node.iter)
        if LOADERS.search(text) and "range(" not in text:
            self.add(node, "dataloader", f"for … in {text}")
        elif "timesteps" in text and SAMPLERS.search(self.at.rpartition(".")[2].lower()):
            self.add(node, "sampling", f"for … in {text}")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        called = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
        names = {func.attr for func in called if isinstance(func, ast.Attribute)}
        if "sleep" in names or (names & POLLED and not names & {"get", "pop", "result"}):
            self.add(node, "polling", f"while {ast.unparse(node.test)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.dotted(node.func)
        of_this_file = isinstance(node.func, ast.Attribute) and node.func.attr in self.methods
        if name.rpartition(".")[0] not in self.own and not of_this_file:
            self.judge(node, name)
        starter = name.rpartition(".")[2] in STARTERS
        self.visit(node.func)
        for number, argument in enumerate([*node.args, *(k.value for k in node.keywords)]):
            keyword = node.keywords[number - len(node.args)].arg if number >= len(node.args) else ""
            before = self.starting
            self.starting = starter and (keyword == "target" or (not keyword and number <= 1))
            self.visit(argument)
            self.starting = before

    def judge(self, node: ast.Call, name: str) -> None:
        """List a call when a rule says that it waits."""
        keywords = {k.arg: k.value for k in node.keywords}
        for rule in RULES:
            if rule.bare and (node.args or set(keywords) - TIMEOUT_WORDS - {"block"}):
                continue
            if not re.fullmatch(rule.calls, name):
                continue
            if any(ast.unparse(v) == "False" for k, v in keywords.items() if k in ("block", "blocking")):
                return
            if rule.kind == "exit" and (node in self.managed or "daemon" in keywords):
                return
            limits = [v for k, v in keywords.items() if k in TIMEOUT_WORDS]
            limits += node.args[rule.at : rule.at + 1] if rule.at is not None else []
            limited = any(ast.unparse(v) != "None" for v in limits)
            kind = "save" if name == "open" and _writes(node) else rule.kind
            self.add(node, kind, f"{ast.unparse(node.func)}(…)", name, OWN if limited else "")
            return


def _writes(node: ast.Call) -> bool:
    modes = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax") for mode in modes)


# -- what ends each


def audit(folder: Path, patches: Sequence[Patch] | None = None) -> Report:
    """The waits of a checkout. Raises Incompatible for a folder that is none."""
    checkout = compatibility.find_checkout(folder.resolve())
    if checkout is None:
        raise Incompatible(f"{folder} is not a checkout of sd-scripts or musubi-tuner")
    report = Report()
    modules = files(checkout.source, report.unread)
    scanners = []
    for module, (path, tree) in sorted(modules.items()):
        file = path.relative_to(checkout.source).as_posix()
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        methods = {node.name for one in classes for node in one.body if isinstance(node, ast.FunctionDef)}
        scanner = Scanner(file, imports(tree, module, path.name == "__init__.py"), set(modules), methods)
        try:
            scanner.visit(tree)
        except RecursionError:
            report.unread[file] = "nested too deeply"
            continue
        report.files.add(file)
        scanners.append(scanner)
    covered = list(_places(checkout, registry.patches(checkout.trainer) if patches is None else patches))
    threads = _threads(scanners)
    for scanner in scanners:
        for wait in scanner.waits:
            wait.by = wait.by or next((cover.patch for cover, places in covered if _covers(cover, places, wait)), "")
            if not wait.by and wait.function not in threads[scanner.file]:
                wait.by = PHASE
        joins = [wait.by for wait in scanner.waits if wait.kind in JOINS and wait.by]
        ends = next((by for by in joins if by != PHASE), PHASE if joins else OPEN)
        for wait in scanner.waits:
            wait.by = wait.by or ends
        report.waits += scanner.waits
    report.waits.sort(key=lambda wait: (wait.file, wait.line))
    return report


def _places(checkout: compatibility.Checkout, patches: Sequence[Patch]) -> Iterator[tuple[Cover, set[tuple[str, str]]]]:
    """Yield each row whose patch is there, with the file and the name of those of its targets that are in the checkout.

    A row that counts anywhere needs all targets of its patch.
    """
    for cover in COVERS:
        for patch in (one for one in patches if one.name == cover.patch):
            found = [compatibility.check_target(target, checkout.source) for target in patch.targets]
            missing = [one for one in found if one.verdict in compatibility.OPEN]
            if missing and cover.where == ANYWHERE:
                continue
            places = set()
            for module, _, name in (one.place.partition(":") for one in found if one not in missing):
                path = locate.find_source(module, checkout.source) if module else None
                if path is not None and path.is_relative_to(checkout.source) and re.fullmatch(cover.targets, name):
                    places.add((path.relative_to(checkout.source).as_posix(), name))
            yield cover, places


def _covers(cover: Cover, places: set[tuple[str, str]], wait: Wait) -> bool:
    if not re.fullmatch(cover.kind, wait.kind) or not re.fullmatch(cover.calls, wait.name):
        return False
    if cover.where == INSIDE:
        return any(wait.file == file and f"{wait.function}.".startswith(f"{name}.") for file, name in places)
    return cover.where == ANYWHERE or wait.file in {file for file, _ in places}


def _threads(scanners: list[Scanner]) -> dict[str, set[str]]:
    """File → its functions that only another thread runs."""
    found: dict[str, set[str]] = {scanner.file: set() for scanner in scanners}
    started = set().union(*(scanner.started for scanner in scanners)) if scanners else set()
    grown = True
    while grown:
        grown, used = False, set()
        for scanner in scanners:
            used |= set().union(*(names for at, names in scanner.uses.items() if at not in found[scanner.file]))
        for scanner in scanners:
            inside = set().union(*(scanner.uses[at] for at in found[scanner.file]))
            for function in set(scanner.uses) - found[scanner.file] - {""}:
                name = function.rpartition(".")[2]
                nested = any(function.startswith(f"{one}.") for one in found[scanner.file])
                if nested or (name not in used and (name in started or name in inside)):
                    found[scanner.file].add(function)
                    grown = True
    return found


# -- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the waits; return 1 when one is open or a file could not be read."""
    parser = argparse.ArgumentParser(description="List the waits of a trainer's checkout and the patch that ends each.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--against", type=Path, metavar="OTHER", help="list only what CHECKOUT has and OTHER has not")
    options = parser.parse_args(arguments)
    try:
        report = audit(options.checkout)
        known = Counter(wait.key for wait in audit(options.against).waits) if options.against else Counter()
    except Incompatible as error:
        parser.error(str(error))
    for wait in report.waits:
        if known[wait.key]:
            known[wait.key] -= 1
        else:
            print(f"{wait.by:12} {wait.kind:10} {wait.file}:{wait.line}  {wait.function}  {wait.call}")
    for file, why in report.unread.items():
        print(f"not read: {file}: {why}")
    ends = Counter(wait.by if wait.by in (OWN, PHASE, OPEN) else "patch" for wait in report.waits)
    shown = ", ".join(f"{n} {by}" for by, n in sorted(ends.items()))
    print(f"\n{len(report.waits)} waits in {len(report.files)} files: {shown}")
    return 1 if report.open or report.unread else 0


if __name__ == "__main__":
    sys.exit(main())
