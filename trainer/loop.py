"""The training loop: all optimizer steps, starting at step 0 or at the step of a state.

A step depends only on its number, so a run that was killed at any point and resumed ends with the same weights as an
undisturbed run. Order after each step: heartbeat, save, validation, sample images, stop. Saves come before sample
images, because sample images can be slow. Sample images that a killed run did not finish at the step of a state are
drawn after its resume. What was requested meanwhile (guards/step_requests.py) follows, then a requested stop.
"""

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from guards import checkpoint, deadline, limits, snapshot_files, world
from guards.heartbeat import REQUEST_STOP
from guards.metrics import Metrics
from guards.snapshot_files import File
from trainer import flow, lora, optimizers, states
from trainer.data_order import batches, seed_for
from trainer.errors import TrainError
from trainer.setup import Training


def train(t: Training) -> str:
    """Runs to the end (`"done"`) or to a requested stop (`"stopped"`). Raises: TrainError, OSError (a save failed)."""
    with t.saves:
        return run(t)


def run(t: Training) -> str:
    """`train` while saves are open."""
    from tqdm.auto import tqdm

    args, metrics, rank_0 = t.args, Metrics.from_env(), t.main
    t.hb.reach("ready")
    step, losses = restore(t)
    output = Path(args.output_dir)
    t.saves.redo(step, lambda guard, files: write(t, output / guard["name"], guard["step"], files))
    if step >= t.total and rank_0:
        finish(t, step, losses)
    # a snapshot is taken after all that follows its step
    if not (t.args.resume and snapshot_files.is_restored(t.args.resume)):
        validate_if_due(t, step, losses, metrics)
        if rank_0:
            samples_due(t, step, losses, usual_s=0.0)
        if 0 < step < t.total and stop_requested(t):  # another step would leave a validation behind that the stop ended
            return stop_here(t, step, losses, None)
    bar = tqdm(total=t.total, initial=step, smoothing=0, mininterval=0, miniters=1, disable=not rank_0, desc="steps")
    durations: deque[float] = deque(maxlen=50)
    t.hb.phase("first_step")
    t.hb.reach("first_step")
    batches = None
    for epoch in range(step // t.per_epoch, t.epochs if step < t.total else 0):
        t.log(f"\nepoch {epoch + 1}/{t.epochs}\n")
        first = step - epoch * t.per_epoch
        t.order.epoch, t.order.start = epoch, first * args.gradient_accumulation_steps
        batches = iter(t.loader)
        while step < min(t.total, (epoch + 1) * t.per_epoch):
            started = time.monotonic()
            loss, rate, stop = one_step(t, step, batches)
            step += 1
            took = time.monotonic() - started
            durations.append(took)
            losses.append(loss)
            t.hb.step(step, epoch + 1, loss, rate)
            if rank_0:
                metrics.step(step=step, epoch=epoch + 1, loss=loss, lr=rate, step_s=took)
                bar.set_postfix(avr_loss=sum(losses) / len(losses), refresh=False)
                bar.update(1)
                if t.accelerator.trackers:
                    t.accelerator.log({"loss/current": loss, "lr/unet": rate}, step=step)
            t.saves.check()
            boundary(t, step, losses, sorted(durations)[len(durations) // 2], metrics)
            snapshot(t, step, losses)
            if (stop or stop_requested(t)) and step < t.total:
                return stop_here(t, step, losses, batches)
    bar.close()
    t.hb.reach("finished")
    t.saves.wait()
    end(t, batches)
    return "done"


def restore(t: Training) -> tuple[int, deque]:
    """The step to continue from (0 without a resume), and the latest losses for the displayed average."""
    losses: deque[float] = deque(maxlen=t.per_epoch)
    if not t.args.resume:
        return 0, losses
    folder = Path(t.args.resume)
    state = states.load(folder, t)
    losses.extend(state["losses"])
    if t.args.max_train_epochs and state.get("planned", {}).get("of") == plan_of(t):
        t.total = state["planned"]["steps"]
        t.epochs = -(-t.total // t.per_epoch)
        t.hb.plan(t.total)
    before = state.get("planned", {}).get("steps", t.total)
    if before != t.total and not t.args.lr_scheduler.startswith("constant"):
        t.log(
            f"resume: the run has {t.total} steps instead of {before}: from here on, the learning rate is that of "
            f"--lr_scheduler {t.args.lr_scheduler} over {t.total} steps, so the result differs from a run that began with them"
        )
    if state["current_step"] > t.total:
        t.log(
            f"resume: the state is of step {state['current_step']} and the run has {t.total} steps, so nothing is trained; "
            "raise --max_train_epochs or --max_train_steps"
        )
    t.sampler.since_s = (folder / checkpoint.GUARD).stat().st_mtime
    t.state = None if snapshot_files.is_restored(folder) else (state["current_step"], folder)
    t.log(f"resumed from step {state['current_step']}: {folder}")
    return state["current_step"], losses


def plan_of(t: Training) -> list[int]:
    """Epochs, images of an epoch, images of a step: with the same a resumed run has the steps that it had.

    Its epochs may have fewer since: where a smaller batch size is accumulated to the same images of a step, batches that
    a bucket did not fill become full ones.
    """
    batch_size = max(image.batch_size for image in t.images)
    each = t.args.gradient_accumulation_steps * t.accelerator.num_processes
    return [t.args.max_train_epochs, sum(image.repeats for image in t.images), batch_size * each]


def one_step(t: Training, step: int, batches) -> tuple[float, float, bool]:
    """Trains optimizer step `step` (0-based): its mean loss, its learning rate, and whether a stop was requested."""
    import torch

    args, accelerator = t.args, t.accelerator
    base = args.unet_lr if args.unet_lr is not None else args.learning_rate
    rate = base * optimizers.factor(args, step, t.total)
    for group in t.optimizer.param_groups:
        if group["lr"] is not None:  # else Adafactor finds a rate for each matrix
            group["lr"] = rate
    # N processes take the same batches, with the same noise, as one that accumulates N times as many.
    each = args.gradient_accumulation_steps * accelerator.num_processes
    count = min(each, t.order.total - step % t.per_epoch * each)
    total = torch.zeros((), device=accelerator.device)
    for number in range(accelerator.process_index, count, accelerator.num_processes):
        began_s = time.monotonic()
        batch = next(batches)
        t.hb.waited(time.monotonic() - began_s)
        seed = seed_for(args.seed, "noise", step, number, 0)
        torch.manual_seed(seed)  # the seed of the LoRA's dropout
        with accelerator.autocast():
            loss = flow.loss_of(args, t.family, t.transformer, batch, seed, accelerator.device, t.dtype)
        accelerator.backward(loss / count)
        total += loss.detach() / count
    stop = t.hb.request == REQUEST_STOP
    if accelerator.num_processes > 1:
        total, stop = add_up(t, total, stop)
    value = total.item()
    if not math.isfinite(value):
        raise TrainError(
            f"the loss of step {step + 1} is {value}: training stops here, and this step is not saved; its images are "
            f"{images_of(t, step)}; lower --learning_rate (or use bf16 instead of fp16) and resume from the last state"
        )
    if args.max_grad_norm:
        accelerator.clip_grad_norm_(list(t.parameters.values()), args.max_grad_norm)
    t.optimizer.step()
    t.optimizer.zero_grad()
    if t.average:
        decay = min(args.ema_decay, (step + 1) / (step + 10))  # as diffusers' EMAModel: short while little is learned
        torch._foreach_lerp_(list(t.average.values()), [p.data for p in t.parameters.values()], 1 - decay)
    group = t.optimizer.param_groups[0]  # d: what Prodigy found
    return value, math.nan if group["lr"] is None else rate * group.get("d", 1.0), stop


def images_of(t: Training, step: int) -> str:
    """The names of the images of a step."""
    each = t.args.gradient_accumulation_steps * t.accelerator.num_processes
    epoch, place = divmod(step, t.per_epoch)
    trained = batches(t.images, t.args.seed, epoch)[place * each : (place + 1) * each]
    return ", ".join(sorted({t.images[image].path.name for batch in trained for image, _ in batch}))


def final_weights(t: Training) -> dict:
    """What is saved, sampled and validated: the weights, or their average where one is kept."""
    return t.average or optimizers.averaged(t.optimizer, t.parameters)


@contextlib.contextmanager
def using_final_weights(t: Training) -> Iterator[None]:
    """In the block the model is evaluated with the final weights; `t.trained` has those that are trained."""
    final, t.trained = final_weights(t), {name: p.data for name, p in t.parameters.items()}
    t.transformer.eval()
    try:
        for name, p in t.parameters.items():
            p.data = final[name].data
        yield
    finally:
        for name, p in t.parameters.items():
            p.data = t.trained[name]
        t.trained = {}
        t.transformer.train()


def add_up(t: Training, loss, stop: bool):
    """Adds gradients and loss over all processes in one call; a stop requested in one process stops all.

    A process that has no batch in the last step of an epoch has no gradients, and adds nothing.
    """
    import torch

    for p in t.parameters.values():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    gradients = [p.grad for p in t.parameters.values()]
    flat = torch.cat([*(g.flatten() for g in gradients), loss.reshape(1), loss.new_tensor([float(stop)])])
    flat = t.accelerator.reduce(flat, reduction="sum")
    at = 0
    for g in gradients:
        g.copy_(flat[at : at + g.numel()].view_as(g))
        at += g.numel()
    return flat[-2], bool(flat[-1] > 0)


def boundary(t: Training, step: int, losses: deque, usual_s: float, metrics: Metrics) -> None:
    """Saves, validation and sample images that are due after a step, on rank 0.

    The other ranks continue and wait for rank 0 in their next step; their heartbeat says what they wait for.
    """
    args = t.args
    saves = saves_due(args, step, ended(t, step), t.epochs)
    requested = t.requests.pending(step)
    if not t.main:
        if saves or t.sampler.due(step, ended(t, step)):
            t.hb.phase("save" if saves else "sample", note="waiting for rank 0")
        else:
            validate_if_due(t, step, losses, metrics)
        return
    for kind, number, name in saves:
        output = Path(args.output_dir)
        save_lora(t, output / f"{name}.safetensors", step)
        if args.save_state:
            t.log(f"saving state at {kind} {number}")
            save_state(t, output / f"{name}-state", step, losses)
    if step == t.total:
        finish(t, step, losses)
    validated = validate_if_due(t, step, losses, metrics)
    for kind in requested:
        if kind != "sample":
            save_requested(t, kind, step, losses, saved=bool(saves))
    if samples_due(t, step, losses, usual_s, requested="sample" in requested) or saves or requested or validated:
        t.hb.phase("step")


def validate_if_due(t: Training, step: int, losses: deque, metrics: Metrics) -> bool:
    """Measures the loss of the held-out images where that is due, on rank 0; returns whether it was due.

    A requested stop ends it early: the state of the stop is of this step, and the resumed run measures again. After the
    last step everything is saved already, and the run is done once it has measured. Several processes stop after the
    next step, so they measure here to the end.
    """
    if not t.validator.due(step, ended(t, step), t.total):
        return False
    if not t.main:
        t.hb.phase("validate", note="waiting for rank 0")
        return True

    def ends_early() -> bool:
        if t.accelerator.num_processes > 1 and kept_for_stop(t, step, losses):
            t.hb.phase("validate", total=t.validator.items)
        return 0 < step < t.total and stop_requested(t)

    with using_final_weights(t):
        value = t.validator.loss(t.transformer, t.hb, t.accelerator.autocast, ends_early)
    if value is not None:
        metrics.validation(step, -(-step // t.per_epoch), value, t.validator.items)
        t.log(f"\nvalidation loss at step {step}: {value:.5g}")
        if t.accelerator.trackers:
            t.accelerator.log({"loss/validation/step_average": value}, step=step)
    return True


def save_requested(t: Training, kind: str, step: int, losses: deque, saved: bool) -> None:
    """Saves the requested checkpoint, for `kind` "save" with its LoRA, unless the step has them; old ones go as usual."""
    args, output = t.args, Path(t.args.output_dir)
    if kind == "save" and not saved:
        save_lora(t, output / f"{states.step_name(args.output_name, step)}.safetensors", step)
    keep_state(t, step, losses)
    gone = last_gone(args, "step", step, state=True)
    t.saves.then("old states", lambda: states.drop_old(output, args.output_name, "step", gone, True, t.log))
    what = "a checkpoint and its LoRA" if kind == "save" else "a checkpoint"
    t.saves.then("the answer to a request", lambda: t.requests.done(kind, step, what))


def drop_replaced(t: Training, step: int, saved: str) -> None:
    """Deletes the old LoRAs or states that a numbered save replaces, now that it is on the disk. saved: its name."""
    args, output = t.args, Path(t.args.output_dir)
    for kind, number, name in saves_due(args, step, ended(t, step), t.epochs):
        if saved in (f"{name}.safetensors", f"{name}-state"):
            state = saved == f"{name}-state"
            every = args.save_every_n_steps if kind == "step" and not state else None
            states.drop_old(output, args.output_name, kind, last_gone(args, kind, number, state), state, t.log, every)


def last_gone(args, kind: str, number: int, state: bool) -> int:
    """The number of the newest LoRA (with `state`: state) that a save replaces; -1: of none.

    The rules of sd-scripts: `save_last_n_steps` counts steps, `save_last_n_epochs` counts saves.
    """
    keep = getattr(args, f"save_last_n_{kind}s_state") if state else None
    keep = getattr(args, f"save_last_n_{kind}s") if keep is None else keep
    if keep is None:
        return -1
    return number - keep - 1 if kind == "step" else number - keep * args.save_every_n_epochs


def saves_due(args, step: int, epoch: int | None, epochs: int) -> list[tuple[str, int, str]]:
    """The numbered saves that are due: ("step" or "epoch", its number, file name)."""
    out = []
    if args.save_every_n_steps and step % args.save_every_n_steps == 0:
        out.append(("step", step, states.step_name(args.output_name, step)))
    if epoch and args.save_every_n_epochs and epoch % args.save_every_n_epochs == 0 and epoch < epochs:
        out.append(("epoch", epoch, f"{args.output_name}-{epoch:06d}"))
    return out


def ended(t: Training, step: int) -> int | None:
    """The epoch (1-based) that ends with this step; None when none does."""
    return step // t.per_epoch if step and step % t.per_epoch == 0 else None


def samples_due(t: Training, step: int, losses: deque, usual_s: float, requested: bool = False) -> bool:
    """Draws the sample images of this step that are due or requested, and missing; whether any were. Rank 0 only."""

    def honor_stop_request() -> None:
        if kept_for_stop(t, step, losses):
            t.hb.phase("sample", note="stop requested; the state is saved, the sample images are finished first")

    due = t.sampler.due(step, ended(t, step))
    if requested and not t.sampler.prompts:
        t.requests.refuse("sample", step, "the run has no prompts for sample images; add some, then start it again")
        requested = False
    if not due and not requested:
        return False
    epoch = ended(t, step) if due and t.args.sample_every_n_epochs else None
    with using_final_weights(t):
        paths = t.sampler.make(
            t.transformer, epoch if step else 0, step, usual_s, t.hb, t.accelerator.autocast, honor_stop_request
        )
    for path in paths:
        t.log(f"sample image: {path}")
    if requested:
        t.requests.done("sample", step, f"{len(paths)} of {len(t.sampler.prompts)} sample images")
    return True


def stop_requested(t: Training) -> bool:
    """Whether a stop is requested of the only process. Several agree on it in a step."""
    return t.accelerator.num_processes == 1 and t.hb.request == REQUEST_STOP


def kept_for_stop(t: Training, step: int, losses: deque) -> bool:
    """Saves a state at once where a stop is requested and the step has none: the work under way may outlast the stop."""
    if t.hb.request != REQUEST_STOP or not step or (t.state is not None and t.state[0] == step):
        return False
    keep_state(t, step, losses)
    t.saves.wait()
    return True


def stop_here(t: Training, step: int, losses: deque, batches) -> str:
    """Saves the state of a requested stop unless the step has one. All ranks wait: a rank that exits ends all."""
    if t.main:
        keep_state(t, step, losses)
        t.saves.wait()
        assert t.state is not None  # keep_state sets it
        t.log(f"stopped on request at step {step}; its state is {t.state[1]}")
    with world.barrier(limits.seconds("save_s"), "the state of a requested stop"):
        t.accelerator.wait_for_everyone()
    end(t, batches)
    return "stopped"


def check_finite(t: Training, step: int) -> None:
    """Raises: TrainError when a weight is not finite."""
    import torch

    for name, parameter in t.parameters.items():
        if not torch.isfinite(parameter).all():
            raise TrainError(
                f"step {step}: the weights of {name} are no longer finite, so nothing is saved; lower --learning_rate "
                "and resume from the last state"
            )


def save_lora(t: Training, path: Path, step: int) -> None:
    """Save the final weights as a LoRA for other programs."""
    t.log(f"\nsaving checkpoint: {path}")
    save(t, path, step, [File(path.name, "safetensors", dict(final_weights(t)))])


def save_state(t: Training, folder: Path, step: int, losses: deque) -> None:
    """Save a state, and remember it as the newest."""
    save(t, folder, step, contents(t, step, losses))
    t.state = step, folder


def save(t: Training, path: Path, step: int, files: list[File]) -> None:
    """Saves a LoRA, or a state when the name is that of one."""
    t.hb.phase("save", note=path.name)
    t.saves.begin(step)
    check_finite(t, step)
    t.saves.save(path.name, step, step // t.per_epoch, files, lambda files: write(t, path, step, files))


def write(t: Training, path: Path, step: int, files: list[File]) -> Path:
    """Write the LoRA or state `path`, then delete those that it replaces. Called in the thread of the saves."""
    if path.name.endswith("-state"):
        states.save(path, files, step=step, epoch=step // t.per_epoch, belongs=t.belongs)
    else:
        scale, about = t.args.network_alpha / t.args.network_dim, lora.describe(t, step)
        data = lora.to_file(files[0].content, t.family.prefix, scale, t.args.save_precision, about)
        checkpoint.atomic_write(path, data)
    drop_replaced(t, step, path.name)
    return path


def contents(t: Training, step: int, losses: deque) -> list[File]:
    """The files of a state. Their tensors are the training's own, in float32, which the next step changes."""
    state = {"current_epoch": step // t.per_epoch, "current_step": step, "losses": list(losses)}
    state["planned"] = {"of": plan_of(t), "steps": t.total}
    files = [
        File("model.safetensors", "safetensors", t.trained or dict(t.parameters)),
        File("optimizer.bin", "torch", t.optimizer.state_dict()),
        File("train_state.json", "raw", json.dumps(state).encode()),
    ]
    if t.average:
        files.append(File(states.AVERAGE, "safetensors", dict(t.average)))
    scaler = t.accelerator.scaler
    return files + ([File("scaler.pt", "torch", scaler.state_dict())] if scaler is not None else [])


def snapshot(t: Training, step: int, losses: deque) -> None:
    """Copies the state of this step into memory when that is due. Everything that follows the step is complete."""
    if t.snapshots.due():
        name = f"{states.step_name(t.args.output_name, step)}-state"
        t.snapshots.take(name, step, step // t.per_epoch, contents(t, step, losses), t.belongs)


def keep_state(t: Training, step: int, losses: deque) -> None:
    """Saves a state that no flag requests, with the name of a save by steps, unless this step has one."""
    if t.state is None or t.state[0] != step:
        save_state(t, Path(t.args.output_dir) / f"{states.step_name(t.args.output_name, step)}-state", step, losses)


def finish(t: Training, step: int, losses: deque) -> None:
    """The last state and the LoRA under its own name."""
    args, output = t.args, Path(t.args.output_dir)
    last = output / f"{args.output_name}-state"
    if (args.save_state or args.save_state_on_train_end) and t.state != (step, last):
        t.log("saving last state.")
        save_state(t, last, step, losses)
    save_lora(t, output / f"{args.output_name}.safetensors", step)


def end(t: Training, batches) -> None:
    """Closes the trackers and the loader's workers, each within a limit, before the outcome is recorded."""
    if t.accelerator.trackers:
        t.hb.phase("end", note="closing the trackers")
        limit_s = limits.seconds("trackers_end_s")
        try:
            deadline.call(t.accelerator.end_training, seconds=limit_s, what=f"{t.args.log_with} to finish")
        except TimeoutError as problem:
            print(f"{problem}. The run ends without it.", file=sys.stderr, flush=True)
            t.end_note = f"the tracker did not finish: {problem}"
    t.hb.phase("end", note="stopping the data loader's workers")
    end_workers(batches)


def end_workers(batches) -> None:
    """Stops the loader's workers within a limit. The interpreter's own exit would wait for a stuck one forever."""
    if not hasattr(batches, "_shutdown_workers"):
        return
    workers = list(batches._workers)
    try:
        deadline.call(
            batches._shutdown_workers, seconds=limits.seconds("end_workers_s"), what="the data loader's workers to exit"
        )
    except TimeoutError as problem:
        print(f"{problem}. They are killed.", file=sys.stderr, flush=True)
        for worker in workers:
            worker.kill()
