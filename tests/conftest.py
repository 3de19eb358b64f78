"""What holds for every test: what did not run is said with its reason; no verdict hangs on how busy the machine is."""

import os
import tempfile
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from ui_helpers import browsing, serving
from ui_page import a_tab

from guards import amx

# Other tests, and runs of this machine, may use GPUs of the same names.
os.environ["HANGPROOF_LOCKS"] = f"{tempfile.gettempdir()}/hangproof-test-locks-{os.getpid()}"

amx.avoid()  # for what computes in the tests' own processes, and for trainers without the guards

# The same examples every time, and no limit on how long one takes (200 ms by default, which a busy machine exceeds).
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


# No worker of ./test.sh is left alone with a long file at the end.
LONGEST = (
    "tests/browser/ui/test_journey.py",
    "tests/process/benchmarks/test_faults.py",
    "tests/process/monitor/cli/test_requests.py",
    "tests/process/monitor/test_supervisor.py",
)


def pytest_collection_modifyitems(items):
    """The files that take longest come first; then those with a browser, which need the processor, among those that wait."""
    places: dict[str, float] = {}
    files = list(dict.fromkeys(item.path.name for item in items))
    for group in (
        [name for name in files if name.startswith("test_ui_")],
        [name for name in files if name[:8] != "test_ui_"],
    ):
        places.update({name: (number + 0.5) / len(group) for number, name in enumerate(group)})
    places.update({name: number - len(LONGEST) for number, name in enumerate(LONGEST)})
    items.sort(key=lambda item: places[item.path.name])


def pytest_terminal_summary(terminalreporter):
    """One line for each reason to skip, however many tests share it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} {'test' if count == 1 else 'tests'} did not run: {reason}")


@pytest.fixture(scope="module")
def browser():
    """One browser for a file's tests."""
    with browsing() as one:
        yield one


@pytest.fixture
def tab(browser):
    """A new tab, which fails the test on a page error."""
    with a_tab(browser) as page:
        yield page


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server for tests that start no run."""
    with serving(tmp_path_factory.mktemp("page") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def moto_port():
    """Returns the port of one moto server (S3) for a file's tests; it starts with the first use."""
    from store_servers import moto

    running: list = []

    def port() -> int:
        if not running:
            manager = moto()
            running.extend((manager, manager.__enter__()))
        return running[1]

    yield port
    if running:
        running[0].__exit__(None, None, None)
