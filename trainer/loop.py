"""The training loop: one optimizer step after the other, from the step of a state or from the first, to the last.

It reads top to bottom. What a step does depends only on its number, so that a run that was killed anywhere and resumed
ends with the weights of one that was not. Order within a step boundary: beat, save, sample, stop; a save comes before
samples because samples are what may be slow. Samples that a kill took from the step of a state are made on its resume.
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
    if rank_0:
        samples_due(t, step, losses, usual_s=0.0)
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
            boundary(t, step, losses, sorted(durations)[len(durations) // 2])
            stop = stop or (t.accelerator.num_processes == 1 and t.hb.request == REQUEST_STOP)
            if stop and step < t.total:
                stop_here(t, step, losses)
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
    t.sampler.since_s = (folder / checkpoint.GUARD).stat().st_mtime
    t.state = state["current_step"], folder
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


def boundary(t: Training, step: int, losses: deque, usual_s: float) -> None:
    """What is due after a step: saves by steps, at the end of an epoch saves by epochs, then samples. Rank 0 does it.

    The other ranks go on and wait for rank 0 in their next step; they say what for.
    """
    args = t.args
    saves = saves_due(args, step, ended(t, step), t.epochs)
    if not t.main:
        if saves or any(t.sampler.due(step, done) for done in moments(t, step)):
            t.hb.phase("save" if saves else "sample", note="rank 0 is at it")
        return
    for label, name, kind, last_gone, last_state_gone in saves:
        output = Path(args.output_dir)
        save_lora(t, output / f"{name}.safetensors", step)
        states.drop_old(output, args.output_name, kind, last_gone, False, t.say)
        if args.save_state:
            t.say(f"saving state at {label}")
            save_state(t, output / f"{name}-state", step, losses)
            states.drop_old(output, args.output_name, kind, last_state_gone, True, t.say)
    if samples_due(t, step, losses, usual_s) or saves:
        t.hb.phase("step")


def saves_due(args, step: int, epoch: int | None, epochs: int) -> list[tuple[str, str, str, int, int]]:
    """(label, file name, kind of number, newest number whose LoRA goes, and whose state goes) of each numbered save.

    sd-scripts' rules: `save_last_n_steps` counts steps, `save_last_n_epochs` counts saves; -1 where all are kept.
    """
    out, slug = [], args.output_name
    if args.save_every_n_steps and step % args.save_every_n_steps == 0:
        keeps = args.save_last_n_steps, first(args.save_last_n_steps_state, args.save_last_n_steps)
        gone = [-1 if keep is None else step - keep - 1 for keep in keeps]
        out.append((f"step {step}", states.step_name(slug, step), "step", *gone))
    if epoch and args.save_every_n_epochs and epoch % args.save_every_n_epochs == 0 and epoch < epochs:
        keeps = args.save_last_n_epochs, first(args.save_last_n_epochs_state, args.save_last_n_epochs)
        gone = [-1 if keep is None else epoch - keep * args.save_every_n_epochs for keep in keeps]
        out.append((f"epoch {epoch}", states.epoch_name(slug, epoch), "epoch", *gone))
    return out


def first(asked: int | None, otherwise: int | None) -> int | None:
    return otherwise if asked is None else asked


def ended(t: Training, step: int) -> int | None:
    """The epoch (from 1) that ends with this step."""
    return step // t.per_epoch if step and step % t.per_epoch == 0 else None


def moments(t: Training, step: int) -> tuple[int | None, ...]:
    """What samples are asked for at this step: by its number, and by the epoch that it ends."""
    return (None, ended(t, step)) if ended(t, step) else (None,)


def samples_due(t: Training, step: int, losses: deque, usual_s: float) -> bool:
    """Makes the samples of this step that are due and not there; were any due? Rank 0 only.

    They may take longer than whoever asks for a stop will wait, so its state is saved as soon as one is asked for.
    """

    def heed() -> None:
        if t.hb.request == REQUEST_STOP and step and (t.state is None or t.state[0] != step):
            save_state_of(t, step, losses)
            t.hb.phase("sample", note="a stop is asked for and its state saved; the images come first")

    due = [done for done in moments(t, step) if t.sampler.due(step, done)]
    for done in due:
        epoch = 0 if step == 0 else done
        for path in t.sampler.make(t.transformer, epoch, step, usual_s, t.hb, t.accelerator.autocast, heed):
            t.say(f"sample image: {path}")
    return bool(due)


def stop_here(t: Training, step: int, losses: deque) -> None:
    """The state of a stop on request, unless that step has one; the ranks wait, as one that leaves ends all."""
    if t.main:
        if t.state is None or t.state[0] != step:
            save_state_of(t, step, losses)
        t.say(f"stopped on request at step {step}; its state is {t.state[1]}")
    t.accelerator.wait_for_everyone()


def check_finite(t: Training, step: int) -> None:
    import torch

    for name, parameter in t.parameters.items():
        if not torch.isfinite(parameter).all():
            raise TrainError(
                f"step {step}: the weights of {name} are no longer finite: nothing is saved; lower --learning_rate and "
                "resume from the last state"
            )


def save_lora(t: Training, path: Path, step: int) -> None:
    t.hb.phase("save", note=path.name)
    check_finite(t, step)
    t.say(f"\nsaving checkpoint: {path}")
    about = lora.describe(
        t.args,
        guided=t.transformer.config.guidance_embeds,
        epoch=-(-step // t.per_epoch),
        step=step,
        images=t.images,
        batches=t.micros,
        epochs=t.epochs,
        steps=t.total,
    )
    scale = t.args.network_alpha / t.args.network_dim
    with Deadline(SAVE_S, f"writing {path.name}"):
        checkpoint.atomic_write(path, lora.to_file(t.parameters, scale, t.args.save_precision, about))


def save_state(t: Training, folder: Path, step: int, losses: deque) -> None:
    t.hb.phase("save", note=folder.name)
    check_finite(t, step)
    with Deadline(SAVE_S, f"writing {folder.name}"):
        states.save(
            folder,
            step=step,
            epoch=step // t.per_epoch,
            parameters=t.parameters,
            optimizer=t.optimizer,
            scaler=t.accelerator.scaler,
            belongs=t.belongs,
            losses=list(losses),
        )
    t.state = step, folder


def save_state_of(t: Training, step: int, losses: deque) -> None:
    """A state that no flag asks for, under the name that a save by steps would give it."""
    save_state(t, Path(t.args.output_dir) / f"{states.step_name(t.args.output_name, step)}-state", step, losses)


def finish(t: Training, step: int, losses: deque) -> None:
    """The last state and the LoRA under its own name; rank 0 only."""
    args, output = t.args, Path(t.args.output_dir)
    if t.accelerator.trackers:
        t.accelerator.end_training()
    if not t.main:
        return
    if args.save_state or args.save_state_on_train_end:
        t.say("saving last state.")
        save_state(t, output / f"{args.output_name}-state", step, losses)
    save_lora(t, output / f"{args.output_name}.safetensors", step)


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
