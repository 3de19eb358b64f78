"""A sample image takes at most its time budget, and its failure never ends the run. As for sd-scripts.

After an image that failed, the model is in evaluation mode and its blocks are placed for inference; both are restored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sd_scripts_patches import sampling
from sd_scripts_patches.musubi import BASE
from sd_scripts_patches.patch import Patch, Target

LOOPS = {
    "musubi_tuner.zimage_train_network": "ZImageNetworkTrainer",
    "musubi_tuner.hv_train_network": "HunyuanVideoNetworkTrainer",
    "musubi_tuner.hv_1_5_train_network": "HunyuanVideo15NetworkTrainer",
    "musubi_tuner.wan_train_network": "WanNetworkTrainer",
    "musubi_tuner.flux_kontext_train_network": "FluxKontextNetworkTrainer",
    "musubi_tuner.flux_2.flux2_utils": "denoise",
    "musubi_tuner.krea2_train_network": "Krea2NetworkTrainer",
    "musubi_tuner.qwen_image_train_network": "QwenImageNetworkTrainer",
}
"""module: what stands beside the progress bar of its denoising loop. The families without one have no budget between
steps, only the deadline of the whole image."""


def _sample_one(original: Callable) -> Callable:
    within_budget = sampling._sample_one(original)

    def sample_image_inference(
        self: Any, accelerator: Any, args: Any, transformer: Any, *rest: Any, **kwargs: Any
    ) -> None:
        was_training = transformer.training
        within_budget(self, accelerator, args, transformer, *rest, **kwargs)
        if transformer.training != was_training:
            transformer.train(was_training)

    return sample_image_inference


def _sample_all(original: Callable) -> Callable:
    def sample_images(
        self: Any, accelerator: Any, args: Any, epoch: Any, steps: Any, *rest: Any, **kwargs: Any
    ) -> None:
        done: list[bool] = []

        def keep(*given: Any, **named: Any) -> None:
            original(*given, **named)
            done.append(True)

        every_image = sampling._sample_all(keep)
        every_image(self, accelerator, args, epoch, steps, *rest, **kwargs)
        if done:
            return
        for model in (model for model in rest if hasattr(model, "parameters")):
            unwrapped = accelerator.unwrap_model(model)
            if hasattr(unwrapped, "switch_block_swap_for_training"):
                unwrapped.switch_block_swap_for_training()

    return sample_images


PATCH = Patch(
    name="sampling",
    why=sampling.PATCH.why,
    targets=(
        Target(
            BASE,
            "NetworkTrainer.sample_images",
            params=("self", "accelerator", "args", "epoch", "steps"),
            make=_sample_all,
        ),
        Target(
            BASE,
            "NetworkTrainer.sample_image_inference",
            params=("self", "accelerator", "args", "transformer"),
            make=_sample_one,
        ),
        *(
            Target(module, "tqdm", beside=beside, optional=True, make=sampling._with_budget)
            for module, beside in LOOPS.items()
        ),
    ),
    relevant=sampling.PATCH.relevant,
)
