"""sd-scripts' own tests end the same with and without the guards."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import patches_helpers as helpers
import tiny_sd_scripts as tiny


def test_sd_scripts_own_tests_pass_the_same_with_and_without(tmp_path):
    """Its test_optimizer.py needs a GPU's worth of optimizers and is left out."""
    args = ["-m", "pytest", "-q", "--ignore=tests/test_optimizer.py", "-rA"]
    args += ["-p", "no:cacheprovider", "-p", "tests_probe"]
    (tmp_path / "tests_probe.py").write_text(
        "import sys\ndef pytest_unconfigure():\n"
        "    print('PATCHED', [m for m in sys.modules if getattr(sys.modules[m], '__hangproof__', 0)])\n"
    )
    tiny.need()
    env = tiny.environment(tiny.workdir())
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"

    def run(launcher):
        result = helpers.watch([str(tiny.python()), *launcher, *args], env, tiny.checkout(), 400)
        assert result.code == 0, result.log[-2000:]
        assert int(re.search(r"(\d+) passed, \d+ skipped", result.log)[1]) >= 98, result.log[-500:]
        patched = result.log.split("PATCHED ")[1].splitlines()[0]
        assert (f"{tiny.home('BaseDataset')!r}" in patched and "'train_network'" in patched) == bool(launcher)
        return sorted(re.findall(r"^(?:PASSED|SKIPPED|FAILED|ERROR) .*", result.log, re.M))

    with ThreadPoolExecutor(2) as pool:
        plain, patched = pool.map(run, ([], ["-m", "sd_scripts_patches"]))
    assert plain == patched
