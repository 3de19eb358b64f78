"""The training loop: one optimizer step after the other, from the step of a state or from the first, to the last.

It reads top to bottom. What a step does depends only on its number, so that a run that was killed anywhere and resumed
ends with the weights of one that was not. Order within a step boundary: beat, save, sample, stop; a save comes before
samples because samples are what may be slow.
"""

import math
import sys
import time
from collections import deque
from pathlib import Path

from guards import checkpoint, deadline
from guards.deadline import Deadline
from guards.heartbeat import REQUEST_STOP
from guards.metrics import Metrics
from trainer import flow, lora, optimizers, states
from trainer.errors import TrainError
from trainer.order import seed_of
from trainer.setup import Training

WORKERS_S = 20.0
SAVE_S = 900.0  # a state of a LoRA is some hundred MB; a disk that needs longer is stuck


def train(t: Training) -> str:
    """Runs to the end (`"done"`) or to a requested stop (`"stopped"`). Raises: TrainError."""
    from tqdm.auto import tqdm

    args, metrics, rank_0 = t.args, Metrics.from_env(), t.main
    step, losses = restore(t)
    if rank_0 and t.sampler.due(0, None) and step == 0:
        sample(t, epoch=0, step=0, usual_s=0.0)
    bar = tqdm(total=t.total, initial=step, smoothing=0, mininterval=0, miniters=1, disable=not rank_0, desc="steps")
    durations: deque[float] = deque(maxlen=50)
    t.hb.phase("first_step")
    batches = None
    for epoch in range(step // t.per_epoch, t.epochs if step < t.total else 0):
        t.say(f"\nepoch {epoch + 1}/{t.epochs}\n")
        first = step - epoch * t.per_epoch
        t.order.at(epoch, first * args.gradient_accumulation_steps)
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
            ended = epoch + 1 if step == (epoch + 1) * t.per_epoch else None
            if rank_0:
                boundary(t, step, epoch, ended, losses, sorted(durations)[len(durations) // 2])
            if stop and step < t.total:
                if rank_0:
                    folder = Path(args.output_dir) / f"{states.step_name(args.output_name, step)}-state"
                    if checkpoint.problems(folder):
                        save_state(t, folder, step, epoch, losses)
                    t.say(f"stopped on request at step {step}; its state is {folder}")
                end_workers(batches)
                return "stopped"
    bar.close()
    finish(t, step, losses)
    end_workers(batches)
    return "done"


def restore(t: Training) -> tuple[int, deque]:
    """The step to go on from (0: from the start) and the last losses, for the average that is shown."""
    losses: deque[float] = deque(maxlen=t.per_epoch)
    if not t.args.resume:
        return 0, losses
    folder = Path(t.args.resume)
    state = states.load(
        folder,
        parameters=t.parameters,
        optimizer=t.optimizer,
        scaler=t.accelerator.scaler,
        belongs=t.belongs,
        say=t.say,
    )
    losses.extend(state["losses"])
    t.say(f"resumed from step {state['current_step']}: {folder}")
    return state["current_step"], losses


def one_step(t: Training, step: int, batches) -> tuple[float, float, bool]:
    """Trains optimizer step `step` (0-based) → its mean loss, its learning rate, whether a stop is asked for."""
    import torch

    args, accelerator = t.args, t.accelerator
    base = args.unet_lr if args.unet_lr is not None else args.learning_rate
    rate = base * optimizers.factor(args, step, t.total)
    optimizers.set_learning_rate(t.optimizer, rate)
    done_before = step % t.per_epoch * args.gradient_accumulation_steps
    micros = min(args.gradient_accumulation_steps, t.micros - done_before)
    total = torch.zeros((), device=accelerator.device)
    for micro in range(micros):
        batch = next(batches)
        seed = seed_of(args.seed, "noise", step, micro, accelerator.process_index)
        torch.manual_seed(seed)  # dropout in the LoRA draws from here
        with accelerator.autocast():
            loss = flow.loss_of(args, t.transformer, batch, seed, accelerator.device, t.dtype)
        accelerator.backward(loss / micros)
        total += loss.detach() / micros
    stop = t.hb.request == REQUEST_STOP
    if accelerator.num_processes > 1:
        total, stop = average(t, total, stop)
    value = total.item()
    if not math.isfinite(value):
        raise TrainError(
            f"the loss of step {step + 1} is {value}: training stops here, nothing of it is saved; lower --learning_rate "
            "(or use bf16 where fp16 is used) and resume from the last state"
        )
    if args.max_grad_norm:
        accelerator.clip_grad_norm_(list(t.parameters.values()), args.max_grad_norm)
    t.optimizer.step()
    t.optimizer.zero_grad()
    return value, rate, stop


def average(t: Training, loss, stop: bool):
    """Averages gradients and loss over the processes, in one call; one that asks to stop stops all."""
    import torch

    gradients = [p.grad for p in t.parameters.values()]
    flat = torch.cat([*(g.flatten() for g in gradients), loss.reshape(1), loss.new_tensor([float(stop)])])
    flat = t.accelerator.reduce(flat, reduction="mean")
    at = 0
    for g in gradients:
        g.copy_(flat[at : at + g.numel()].view_as(g))
        at += g.numel()
    return flat[-2], bool(flat[-1] > 0)


def boundary(t: Training, step: int, epoch: int, ended: int | None, losses: deque, usual_s: float) -> None:
    """What is due after a step: saves by steps, at the end of an epoch saves by epochs, then samples. Rank 0 only."""
    args, output, slug = t.args, Path(t.args.output_dir), t.args.output_name
    busy = False
    if args.save_every_n_steps and step % args.save_every_n_steps == 0:
        busy = True
        name = states.step_name(slug, step)
        save_lora(t, output / f"{name}.safetensors", step, epoch)
        states.drop_old(output, slug, step=step, epoch=None, keep=args.save_last_n_steps, state=False)
        if args.save_state:
            t.say(f"saving state at step {step}")
            save_state(t, output / f"{name}-state", step, epoch, losses)
            keep = args.save_last_n_steps_state or args.save_last_n_steps
            states.drop_old(output, slug, step=step, epoch=None, keep=keep, state=True)
    if ended and args.save_every_n_epochs and ended % args.save_every_n_epochs == 0 and ended < t.epochs:
        busy = True
        name = states.epoch_name(slug, ended)
        save_lora(t, output / f"{name}.safetensors", step, ended)
        states.drop_old(
            output, slug, step=None, epoch=ended, keep=epochs_kept(args, args.save_last_n_epochs), state=False
        )
        if args.save_state:
            t.say(f"saving state at epoch {ended}")
            save_state(t, output / f"{name}-state", step, ended, losses)
            keep = epochs_kept(args, args.save_last_n_epochs_state or args.save_last_n_epochs)
            states.drop_old(output, slug, step=None, epoch=ended, keep=keep, state=True)
    for done in (None, ended) if ended else (None,):
        if t.sampler.due(step, done):
            busy = True
            sample(t, epoch=done, step=step, usual_s=usual_s)
    if busy:
        t.hb.phase("step")


def epochs_kept(args, saves: int | None) -> int | None:
    """`save_last_n_epochs` counts saves, not epochs (`save_last_n_steps` counts steps): sd-scripts' rule."""
    return None if saves is None else saves * args.save_every_n_epochs


def sample(t: Training, epoch: int | None, step: int, usual_s: float) -> None:
    for path in t.sampler.make(t.transformer, epoch, step, usual_s, t.hb, t.accelerator.autocast):
        t.say(f"sample image: {path}")


def check_finite(t: Training, step: int) -> None:
    import torch

    for name, parameter in t.parameters.items():
        if not torch.isfinite(parameter).all():
            raise TrainError(
                f"step {step}: the weights of {name} are no longer finite: nothing is saved; lower --learning_rate and "
                "resume from the last state"
            )


def save_lora(t: Training, path: Path, step: int, epoch: int) -> None:
    t.hb.phase("save", note=path.name)
    check_finite(t, step)
    t.say(f"\nsaving checkpoint: {path}")
    about = lora.describe(
        t.args,
        guided=t.transformer.config.guidance_embeds,
        epoch=epoch,
        step=step,
        images=t.images,
        batches=t.micros,
        epochs=t.epochs,
        steps=t.total,
    )
    scale = t.args.network_alpha / t.args.network_dim
    with Deadline(SAVE_S, f"writing {path.name}"):
        checkpoint.atomic_write(path, lora.to_file(t.parameters, scale, t.args.save_precision, about))


def save_state(t: Training, folder: Path, step: int, epoch: int, losses: deque) -> None:
    t.hb.phase("save", note=folder.name)
    check_finite(t, step)
    with Deadline(SAVE_S, f"writing {folder.name}"):
        states.save(
            folder,
            step=step,
            epoch=epoch,
            parameters=t.parameters,
            optimizer=t.optimizer,
            scaler=t.accelerator.scaler,
            belongs=t.belongs,
            losses=list(losses),
        )


def finish(t: Training, step: int, losses: deque) -> None:
    """The last state and the LoRA under its own name; rank 0 only."""
    args, output = t.args, Path(t.args.output_dir)
    if t.accelerator.trackers:
        t.accelerator.end_training()
    if not t.main:
        return
    if args.save_state or args.save_state_on_train_end:
        t.say("saving last state.")
        save_state(t, output / f"{args.output_name}-state", step, t.epochs, losses)
    save_lora(t, output / f"{args.output_name}.safetensors", step, t.epochs)


def end_workers(batches) -> None:
    """Ends the loader's workers, within a time. The interpreter's own exit would wait for a stuck one for ever."""
    if not hasattr(batches, "_shutdown_workers"):
        return
    workers = list(batches._workers)
    try:
        deadline.call(batches._shutdown_workers, seconds=WORKERS_S, what="the end of the data loader's workers")
    except TimeoutError as problem:
        print(f"{problem}: they are killed", file=sys.stderr, flush=True)
        for worker in workers:
            worker.kill()
