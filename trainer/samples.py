"""Sample images during training, drawn by the pipeline of the model from cached prompts.

A sample image never ends a run: each image has a time limit that is checked between denoising steps, and an image that
is late or fails is reported and skipped. Only a denoising step that never returns ends the process, through `Deadline`.
Noise is drawn on the CPU from a fixed seed, so the images of two steps can be compared.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from guards import checkpoint, limits
from guards.deadline import Deadline
from trainer import cache, models
from trainer.errors import TrainError

BUDGET_STEPS = 20.0  # × the usual training step, for each denoising step
NUMBER = r"(\d+\.?\d*|\.\d+)(?![\d.])"
PATTERNS: dict[str, tuple[str, str, Callable[[str], int | float | str]]] = {
    "w": (r"w (\d+)", "width", int),
    "h": (r"h (\d+)", "height", int),
    "d": (r"d (\d+)", "seed", int),
    "s": (r"s (\d+)", "steps", lambda text: max(1, min(1000, int(text)))),
    "l": (f"l {NUMBER}", "cfg", float),
    "g": (f"g {NUMBER}", "guidance", float),
    "fs": (f"fs {NUMBER}", "shift", float),
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
    cfg: float | None = None  # the scale of classifier-free guidance; None: the family's
    negative: str = ""
    shift: float | None = None  # of the noise levels; None: the scheduler's own


def read(file: Path, seed: int, log: Callable[[str], None]) -> list[Prompt]:
    """The prompts of a .txt file: one per line, `#` for comments, with sd-scripts' options (PATTERNS).

    A line without --d gets the seed of the run plus its number, so that images of different steps are comparable.
    """
    if file.suffix.lower() != ".txt":
        raise TrainError(f"--sample_prompts {file}: must be a .txt file with one prompt per line")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
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


def of_family(prompts: list[Prompt], family: Any) -> list[Prompt]:
    """The prompts with the scale of classifier-free guidance that counts for a family."""
    usual = [replace(one, cfg=family.cfg) if one.cfg is None else one for one in prompts]
    return [replace(one, cfg=one.guidance) for one in usual] if family.guidance_is_cfg else usual


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

    def __init__(
        self, prompts: list[Prompt], paths: cache.Paths, model: Path, family, args, device, dtypes: tuple, log
    ):
        self.prompts, self.paths, self.model, self.family, self.args = prompts, paths, model, family, args
        self.device, self.dtypes, self.log = device, dtypes, log
        self.pipeline: Any = None
        self.since_s = math.inf

    def due(self, step: int, epoch_done: int | None) -> bool:
        """Whether images are due, by the rule of sd-scripts: by epochs if these are set, else by steps.

        epoch_done: the epoch (1-based) that ends with this step; None when none does.
        """
        if not self.prompts:
            return False
        if step == 0:
            return self.args.sample_at_first
        if self.args.sample_every_n_epochs:
            return epoch_done is not None and epoch_done % self.args.sample_every_n_epochs == 0
        return bool(self.args.sample_every_n_steps) and step % self.args.sample_every_n_steps == 0

    def make(self, transformer, epoch: int | None, step: int, usual_step_s: float, hb, autocast, between) -> list[Path]:
        """Draws the missing images of one moment; returns the paths of the new ones.

        between: called without arguments after each denoising step, for what cannot wait until the images are done.
        """
        import torch

        folder = Path(self.args.output_dir) / "sample"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            prompts = [p for p in self.prompts if not self.made(folder, epoch, step, p)]
        except OSError as problem:
            self.log(f"sample images are skipped: {folder}: {problem.strerror}")
            return []
        if not prompts:
            return []
        self.log(f"generating sample images at step: {step}")
        written = []
        for prompt in prompts:
            hb.phase("sample", total=prompt.steps, note=prompt.prompt)
            budget_s = max(limits.seconds("sample_least_s"), BUDGET_STEPS * usual_step_s * prompt.steps)
            try:
                with (
                    Deadline(budget_s + limits.seconds("sample_grace_s"), f"sample image {prompt.number + 1}"),
                    torch.no_grad(),
                    autocast(),
                ):
                    image = self.image(transformer, prompt, budget_s, hb, between)
                path = folder / file_name(self.args.output_name, epoch, step, prompt)
                with checkpoint.writing_file(path) as unfinished:
                    image.save(unfinished, format="PNG")
                written.append(path)
                for old in self.drawn(folder, epoch, step, prompt):  # by an attempt that left no state
                    if old != path and old.read_bytes() == path.read_bytes():
                        old.unlink()
            except (SampleError, TrainError, *models.WRONG) as problem:
                self.log(f"sample image {prompt.number + 1} is skipped: {type(problem).__name__}: {problem}")
        return written

    def drawn(self, folder: Path, epoch: int | None, step: int, prompt: Prompt) -> list[Path]:
        """The files of the image, under any time in their names."""
        before, after = file_name(self.args.output_name, epoch, step, prompt, "\0").split("\0")
        return [p for p in folder.iterdir() if p.name.startswith(before) and p.name.endswith(after)]

    def made(self, folder: Path, epoch: int | None, step: int, prompt: Prompt) -> bool:
        """Whether the image was drawn since the resumed state, so that it need not be drawn again."""
        return any(p.lstat().st_mtime >= self.since_s for p in self.drawn(folder, epoch, step, prompt))

    def image(self, transformer, prompt: Prompt, budget_s: float, hb, after_step: Callable[[], None]):
        """One image. Raises: SampleError when its time limit is exceeded."""
        import torch

        pipe = self.pipeline or self.build(transformer)
        pipe.scheduler = self.scheduler(prompt)
        started = time.monotonic()

        def between(_pipe, done, _timestep, values):
            hb.item(done + 1, prompt.prompt)
            after_step()
            if time.monotonic() - started > budget_s:
                raise SampleError(f"{done + 1} of {prompt.steps} steps took longer than its limit of {budget_s:.0f} s")
            return values

        text = self.embeddings(prompt.prompt)
        without = self.embeddings(prompt.negative) if prompt.cfg != 1.0 else None
        picture = pipe(
            height=prompt.height,
            width=prompt.width,
            num_inference_steps=prompt.steps,
            generator=torch.Generator().manual_seed(prompt.seed),
            callback_on_step_end=between,
            output_type="pt",
            return_dict=False,
            **self.family.sample(text, without, prompt, self.args),
        )[0]
        if not torch.isfinite(picture).all():
            raise SampleError("the image has values that are not finite")
        return pipe.image_processor.numpy_to_pil(pipe.image_processor.pt_to_numpy(picture.float()))[0]

    def embeddings(self, text: str) -> dict:
        """The cached tensors of a prompt as a batch of one, on the device."""
        from trainer.flow import on_device

        cached = {key: value[None] for key, value in cache.load(self.paths.prompts[text]).items()}
        return on_device(cached, self.device, self.dtypes[1])

    def scheduler(self, prompt: Prompt):
        """The model's scheduler with the shift of a prompt, which is instead of one that depends on the image's size,
        and with what the model is trained to predict."""
        kept = models.config(self.model, "scheduler", "scheduler_config.json")
        changed: dict[str, Any] = {"prediction_type": "v_prediction"} if self.args.v_parameterization else {}
        if prompt.shift is not None:
            changed |= {"shift": prompt.shift, "use_dynamic_shifting": False}
        return models.class_of(self.model, "scheduler").from_config(kept, **changed)

    def build(self, transformer):
        """The pipeline around the trained model; the VAE is on the device only while it decodes."""
        import torch

        vae = models.load_part(self.model, "vae", self.dtypes[0], "cpu")
        decode = vae.decode

        def decode_on_device(latents, **more):
            vae.to(self.device)
            try:
                with torch.autocast(self.device.type, enabled=False):
                    return decode(latents.to(self.device, self.dtypes[0]), **more)
            finally:
                vae.to("cpu")  # an out-of-memory error here must not reduce the memory for training

        vae.decode = decode_on_device
        parts = {"vae": vae, self.family.denoiser: transformer}
        self.pipeline = models.pipeline(self.model, device=self.device, **parts)
        return self.pipeline
