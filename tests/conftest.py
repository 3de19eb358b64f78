"""What holds for every test: what did not run is said with its reason; no verdict hangs on how busy the machine is."""

import contextlib
import functools
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from flaky_report import pytest_configure
from hypothesis import HealthCheck, settings
from ui_helpers import browsing, serving, without_its_loop
from ui_page import a_tab

from guards import machine

# Other tests, and runs of this machine, may use GPUs of the same names.
os.environ["HANGPROOF_LOCKS"] = f"{tempfile.gettempdir()}/hangproof-test-locks-{os.getpid()}"

machine.avoid_amx()  # for what computes in the tests' own processes, and for trainers without the guards

# The same examples every time, and no limit on how long one takes (200 ms by default, which a busy machine exceeds).
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


# The folder says what a test needs. Files that wait and files that compute take turns, and the short ones of `unit`
# come last, so that no worker is left alone with a long file at the end.
TIERS = ("process", "cluster", "network", "browser", "trainer", "upstream", "campaigns", "unit")
WAITING = TIERS[:3]
TESTS = Path(__file__).parent


def tier(item: pytest.Item) -> str:
    """The name of the folder that a test is in."""
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Each test has its tier as a mark; the order is the one above."""
    files: dict[str, dict[Path, None]] = {name: {} for name in ("waiting", "computing", "unit")}
    for item in items:
        name = tier(item)
        item.add_marker(name)
        files["unit" if name == "unit" else "waiting" if name in WAITING else "computing"][item.path] = None
    groups = files.items()
    places = {path: (name == "unit", (n + 0.5) / len(found)) for name, found in groups for n, path in enumerate(found)}
    items.sort(key=lambda item: places[item.path])


def pytest_terminal_summary(terminalreporter):
    """One line for each reason to skip, however many tests share it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} {'test' if count == 1 else 'tests'} did not run: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Only tests with a browser see the event loop that Playwright runs from the first of them on."""
    with contextlib.nullcontext() if "browser" in item.fixturenames else without_its_loop():
        return (yield)


@pytest.fixture(scope="session")
def browser():
    """One browser for all tests of this process."""
    with browsing() as one:
        yield one


@pytest.fixture
def tab(browser):
    """A new tab, which fails the test on a page error."""
    with a_tab(browser) as page:
        yield page


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One server for all tests of this process that start no run and need no folder of their own."""
    with serving(tmp_path_factory.mktemp("page") / "data") as running:
        yield running


@pytest.fixture
def one_thread():
    """Threads that wait for each other make a small model slow where there are more threads than free processors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
