"""kohya's real trainers: SD_SCRIPTS_DIR, SD_SCRIPTS_0111 (another version), MUSUBI_DIR and SD_SCRIPTS_PYTHON name them.

Without them a test here is skipped and says what is missing. Where all four are set, a skip is a failure.
"""

import os

import pytest
import tiny_musubi
import tiny_sd_scripts
from runs_helpers import data

NAMED = ("SD_SCRIPTS_DIR", "SD_SCRIPTS_0111", "MUSUBI_DIR", "SD_SCRIPTS_PYTHON")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and all(map(os.environ.get, NAMED)):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped although every checkout is named: {report.longrepr[2]}"


@pytest.fixture(scope="module", params=tiny_sd_scripts.checkouts() or [None], ids=lambda folder: folder and folder.name)
def sd_scripts(request):
    """Run the test on each version of sd-scripts; the folder of its checkout."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv("SD_SCRIPTS_DIR", str(request.param))
        tiny_sd_scripts.need()
        yield request.param


@pytest.fixture(scope="module")
def each_work(sd_scripts):
    """The tiny weights of sd-scripts' FLUX, for each version."""
    return tiny_sd_scripts.workdir()


@pytest.fixture(scope="module")
def work(newest):
    """The same for the newest version alone."""
    return tiny_sd_scripts.workdir()


@pytest.fixture(scope="module")
def newest(request):
    """The newest version of sd-scripts alone, for what does not depend on it; the folder of its checkout."""
    with pytest.MonkeyPatch.context() as patch:
        found = tiny_sd_scripts.checkouts()
        if found:
            patch.setenv("SD_SCRIPTS_DIR", str(found[-1]))
        tiny_sd_scripts.need()
        yield found[-1]


@pytest.fixture(scope="module")
def musubi():
    """musubi-tuner; the folder of its checkout."""
    if reason := tiny_musubi.why_not():
        pytest.skip(reason)
    return tiny_musubi.checkout()
