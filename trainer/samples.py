"""Sample images during training, drawn by diffusers' FluxPipeline from cached prompts.

A sample image never ends a run: each image has a time limit that is checked between denoising steps, and an image that is
late or fails is reported and skipped. Only a denoising step that never returns ends the process, through `Deadline`. Noise
is drawn on the CPU from a fixed seed, so the images of two steps can be compared.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from guards import checkpoint, limits
from guards.deadline import Deadline
from trainer import cache, models
from trainer.errors import TrainError

if TYPE_CHECKING:
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

BUDGET_STEPS = 20.0  # × the usual training step, for each denoising step
PATTERNS: dict[str, tuple[str, str, Callable[[str], int | float | str]]] = {
    "w": (r"w (\d+)", "width", int),
    "h": (r"h (\d+)", "height", int),
    "d": (r"d (\d+)", "seed", int),
    "s": (r"s (\d+)", "steps", lambda text: max(1, min(1000, int(text)))),
    "l": (r"l ([\d.]+)", "cfg", float),
    "g": (r"g ([\d.]+)", "guidance", float),
    "n": (r"n (.+)", "negative", str),
}


class SampleError(Exception):
    """A sample image is skipped; the message is the reason."""


@dataclass(frozen=True)
class Prompt:
    """One line of the prompt file, numbered from 0. Sizes in pixels."""

    number: int
    prompt: str
    seed: int
    width: int = 512
    height: int = 512
    steps: int = 20
    guidance: float = 3.5
    cfg: float = 1.0
    negative: str = ""


def read(file: Path, seed: int, log: Callable[[str], None]) -> list[Prompt]:
    """The prompts of a .txt file: one per line, `#` for comments, with sd-scripts' options ` --w --h --s --d --g --l --n`.

    A line without --d gets the seed of the run plus its number, so that images of different steps are comparable.
    """
    if file.suffix.lower() != ".txt":
        raise TrainError(f"--sample_prompts {file}: must be a .txt file with one prompt per line")
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise TrainError(
            f"--sample_prompts {file}: cannot be read: {problem}; correct the path or save the file as UTF-8"
        ) from problem
    out: list[Prompt] = []
    for line in (line.strip() for line in lines if line.strip() and not line.startswith("#")):
        text, *options = line.split(" --")
        found: dict = {"seed": seed + len(out)}
        for option in options:
            pattern, name, kind = PATTERNS.get(option.split(" ")[0].lower(), ("(?!)", "", str))
            match = re.match(pattern, option.strip(), re.IGNORECASE)
            if match:
                found[name] = kind(match[1])
            else:
                log(f"{file}: '--{option}' is not an option of sample images and has no effect; remove it")
        for side in ("width", "height"):
            if side in found:
                found[side] = max(64, found[side] - found[side] % 16)
        out.append(Prompt(len(out), text, **found))
    if not out:
        log(f"{file}: no prompts, so no sample images are drawn; add one prompt per line")
    return out


def texts(prompts: list[Prompt]) -> list[str]:
    """All texts to encode for the prompts."""
    return sorted({p.prompt for p in prompts} | {p.negative for p in prompts if p.cfg != 1.0})


def file_name(output_name: str, epoch: int | None, step: int, prompt: Prompt, at: str = "") -> str:
    """The name as in sd-scripts: `{name}_{e000001|000500}_{number}_{time}_{seed}.png`; `at`: the time, default now."""
    when = f"e{epoch:06d}" if epoch is not None else f"{step:06d}"
    return f"{output_name}_{when}_{prompt.number:02d}_{at or time.strftime('%Y%m%d%H%M%S')}_{prompt.seed}.png"


class Sampler:
    """Draws the images of all prompts. The pipeline is built at the first use, and its VAE is kept on the CPU.

    `since_s`: an image file that is newer (file-system time) need not be drawn again. After a resume it is the time of
    the state, because the killed run has drawn some images of the steps that are repeated.
    """

    def __init__(self, prompts: list[Prompt], paths: cache.Paths, model: Path, args, device, dtypes: tuple, log):
        self.prompts, self.paths, self.model, self.args = prompts, paths, model, args
        self.device, self.dtypes, self.log = device, dtypes, log
        self.pipeline: FluxPipeline | None = None
        self.since_s = math.inf

    def due(self, step: int, epoch_done: int | None) -> bool:
        """Whether images are due, by the rule of sd-scripts: by epochs if these are set, else by steps."""
        if not self.prompts:
            return False
        if step == 0:
            return self.args.sample_at_first
        if self.args.sample_every_n_epochs:
            return epoch_done is not None and epoch_done % self.args.sample_every_n_epochs == 0
        return (
            bool(self.args.sample_every_n_steps) and epoch_done is None and step % self.args.sample_every_n_steps == 0
        )

    def make(
        self,
        transformer,
        epoch: int | None,
        step: int,
        usual_step_s: float,
        hb,
        autocast,
        between_steps: Callable[[], None],
    ) -> list[Path]:
        """Draws the missing images of one moment; returns the paths of the new ones.

        between_steps: called after each denoising step, for what cannot wait until the images are done.
        """
        import torch

        from trainer import flow

        folder = Path(self.args.output_dir) / "sample"
        folder.mkdir(parents=True, exist_ok=True)
        prompts = [p for p in self.prompts if not self.made(folder, epoch, step, p)]
        if not prompts:
            return []
        self.log(f"generating sample images at step: {step}")
        written = []
        with flow.evaluating(transformer):
            for prompt in prompts:
                hb.phase("sample", total=prompt.steps, note=prompt.prompt)
                budget_s = max(limits.seconds("sample_least_s"), BUDGET_STEPS * usual_step_s * prompt.steps)
                try:
                    with (
                        Deadline(budget_s + limits.seconds("sample_grace_s"), f"sample image {prompt.number + 1}"),
                        torch.no_grad(),
                        autocast(),
                    ):
                        image = self.image(transformer, prompt, budget_s, hb, between_steps)
                    path = folder / file_name(self.args.output_name, epoch, step, prompt)
                    with checkpoint.writing_file(path) as unfinished:
                        image.save(unfinished, format="PNG")
                    written.append(path)
                except (SampleError, TrainError, TimeoutError, ValueError, RuntimeError, OSError) as problem:
                    self.log(f"sample image {prompt.number + 1} is skipped: {type(problem).__name__}: {problem}")
        return written

    def made(self, folder: Path, epoch: int | None, step: int, prompt: Prompt) -> bool:
        before, after = file_name(self.args.output_name, epoch, step, prompt, "\0").split("\0")
        names = (p for p in folder.iterdir() if p.name.startswith(before) and p.name.endswith(after))
        return any(p.stat().st_mtime >= self.since_s for p in names)

    def image(self, transformer, prompt: Prompt, budget_s: float, hb, between_steps: Callable[[], None]):
        """One image. Raises: SampleError when its time limit is exceeded."""
        import torch

        pipe = self.pipeline or self.build(transformer)
        started = time.monotonic()

        def between(_pipe, done, _timestep, values):
            hb.item(done + 1, prompt.prompt)
            between_steps()
            if time.monotonic() - started > budget_s:
                raise SampleError(f"{done + 1} of {prompt.steps} steps took longer than its limit of {budget_s:.0f} s")
            return values

        text = self.embeddings(prompt.prompt)
        extra = {}
        if prompt.cfg != 1.0:
            negative = self.embeddings(prompt.negative)
            extra = {
                "true_cfg_scale": prompt.cfg,
                "negative_prompt_embeds": negative["t5"],
                "negative_pooled_prompt_embeds": negative["clip"],
            }
        if self.args.apply_t5_attn_mask:
            from trainer.flow import attention_mask

            tokens = (prompt.height // 16) * (prompt.width // 16)
            extra["joint_attention_kwargs"] = {"attention_mask": attention_mask(text["mask"], tokens)}
        latents = pipe(
            prompt_embeds=text["t5"],
            pooled_prompt_embeds=text["clip"],
            height=prompt.height,
            width=prompt.width,
            num_inference_steps=prompt.steps,
            guidance_scale=prompt.guidance,
            generator=torch.Generator().manual_seed(prompt.seed),
            callback_on_step_end=between,
            output_type="latent",
            return_dict=False,
            **extra,
        )[0]
        return self.decode(pipe, latents, prompt)

    def decode(self, pipe, latents, prompt: Prompt):
        import torch

        vae = pipe.vae.to(self.device)
        try:
            with torch.autocast(self.device.type, enabled=False):
                spread = pipe._unpack_latents(latents, prompt.height, prompt.width, pipe.vae_scale_factor)
                spread = spread / vae.config.scaling_factor + vae.config.shift_factor
                picture = vae.decode(spread.to(self.dtypes[0]), return_dict=False)[0]
        finally:
            vae.to("cpu")  # an out-of-memory error here must not reduce the memory for training
        if not torch.isfinite(picture).all():
            raise SampleError("the image has values that are not finite")
        return pipe.image_processor.postprocess(picture.float().cpu(), output_type="pil")[0]

    def embeddings(self, text: str) -> dict:
        cached = cache.load_text(self.paths.prompts[text])
        out = {key: cached[key][None].to(self.device, self.dtypes[1]) for key in ("t5", "clip")}
        return {**out, "mask": cached["mask"][None].to(self.device)}

    def build(self, transformer):
        from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

        class Pipeline(FluxPipeline):
            _execution_device = self.device  # the VAE is on the CPU, in split mode also half of the transformer

        pipeline = Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler.from_config(
                models.config(self.model, "scheduler", "scheduler_config.json")
            ),
            vae=models.load_part(self.model, "vae", self.dtypes[0], "cpu"),
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=transformer,
        )
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = pipeline
        return pipeline
