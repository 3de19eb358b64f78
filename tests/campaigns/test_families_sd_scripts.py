"""Every family of sd-scripts, tiny weights, CPU, its own script: its loader reads its LoRA, and its samples have a budget.

That it trains the same numbers with the patches is in tests/upstream/test_families.py, kills are in test_epoch_ends.py.
"""

import socket

import patches_helpers as helpers
import pytest
import resume_helpers
import tiny_families as families
import tiny_sd_scripts as tiny

pytestmark = pytest.mark.timeout(900)


def train(name, out, *more, env=(), **changed):
    """Train a family into `out`, with the images there."""
    work = families.workdir(name)
    arguments = families.arguments(name, work, out / "images", out / "made", *more, **changed)
    environment = families.environment(name, work, HANGPROOF_RUN=str(out), **dict(env))
    result = helpers.watch(families.command(name, arguments, True), environment, tiny.checkout(), 400)
    assert result.code == 0, result.log[-3000:]
    return result.log


@pytest.mark.parametrize("name", families.FAMILIES)
def test_its_own_loader_reads_the_lora_and_a_sample_over_its_budget_is_skipped_in_its_own_loop(name, tmp_path):
    """One step from a LoRA with a learning rate that is 0 in float32: the LoRA that is saved is the one that was read,
    to the digit. Sample images have no time, and a hub accepts connections and never answers.

    With --dim_from_weights the family's network module reads the file twice: for its shape, then for its weights.
    """
    if reason := families.why_not(name):
        pytest.skip(reason)
    tiny.copy_of(families.workdir(name), tmp_path)
    train(name, tmp_path)
    trained = tmp_path / "trained"
    (tmp_path / "made").rename(trained)
    lora = trained / "tiny.safetensors"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        log = train(
            name, tmp_path, "--network_weights", str(lora), "--dim_from_weights", "--sample_at_first",
            env={"HANGPROOF_SAMPLE_BUDGET_S": "0.001", "HANGPROOF_HUB_TIMEOUT_S": "60", **online},
            learning_rate="1e-60", max_train_epochs=None, max_train_steps="1",
        )  # fmt: skip
    assert f"load network weights from {lora}: <All keys matched successfully>" in log, log[-3000:]
    one, other = (resume_helpers.tensors(path) for path in (tmp_path / "made/tiny.safetensors", lora))
    assert one == other
    skipped = "sample image 1 skipped: BudgetExceeded: the budget of 0.001 s was exceeded after"
    assert log.count(skipped) == 1 and not list((tmp_path / "made").rglob("*.png")), log[-3000:]
