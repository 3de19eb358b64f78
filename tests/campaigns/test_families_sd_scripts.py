"""Every family of sd-scripts, tiny weights, CPU, its own script: guarded it trains the same numbers as unguarded, its loader
reads its LoRA, and its samples have a budget. Kills are in test_epoch_ends.py.
"""

import socket

import family_trainings
import patches_helpers as helpers
import pytest
import resume_helpers
import tiny_families as families
import tiny_sd_scripts as tiny

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_it_trains_the_same_its_loader_reads_the_lora_and_a_sample_over_its_budget_is_skipped(name, tmp_path):
    """One more step from the LoRA with a learning rate that is 0 in float32: the LoRA that is saved is the one that was
    read, to the digit. Sample images have no time, and a hub accepts connections and never answers.

    With --dim_from_weights the family's network module reads the file twice: for its shape, then for its weights.
    """
    if reason := families.why_not(name):
        pytest.skip(reason)
    guarded = family_trainings.sd_scripts(name, tmp_path)
    lora, made, work = guarded / "made/tiny.safetensors", tmp_path / "made", families.workdir(name)
    arguments = families.arguments(
        name, work, guarded / "images", made, "--network_weights", str(lora), "--dim_from_weights", "--sample_at_first",
        learning_rate="1e-60", max_train_epochs=None, max_train_steps="1",
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        limits = {"HANGPROOF_SAMPLE_BUDGET_S": "0.001", "HANGPROOF_HUB_TIMEOUT_S": "60"}
        environment = families.environment(name, work, HANGPROOF_RUN=str(tmp_path), **online, **limits)
        result = helpers.watch(families.command(name, arguments, True), environment, tiny.checkout(), 400)
    assert result.code == 0, result.log[-3000:]
    assert f"load network weights from {lora}: <All keys matched successfully>" in result.log, result.log[-3000:]
    assert resume_helpers.tensors(made / "tiny.safetensors") == resume_helpers.tensors(lora)
    skipped = "sample image 1 skipped: BudgetExceeded: the budget of 0.001 s was exceeded after"
    assert result.log.count(skipped) == 1 and not list(made.rglob("*.png")), result.log[-3000:]
