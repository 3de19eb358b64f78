"""The statements that resume.py inserts into kohya's `train()`, in its syntax tree."""

from __future__ import annotations

import ast

from sd_scripts_patches import ast_utils
from sd_scripts_patches.patch import find_function

AT_FIRST = "self.sample_images(accelerator, args, 0, global_step"
VALIDATION = "if accelerator.sync_gradients and validation_steps > 0 and should_validate_step:"
LOCALS = (
    *("args", "accelerator", "train_dataloader", "skipped_dataloader", "loss_recorder", "progress_bar"),
    *("steps_from_state", "current_epoch", "current_step", "epoch_to_start", "num_train_epochs", "initial_step"),
    *("global_step", "epoch", "step", "batch", "loss"),
)
"""The local variables of `train()` that the inserted statements use."""


def rewrite(tree: ast.Module) -> ast.Module:
    """Insert the calls to `run` into `train()`. Raises Incompatible when a statement is not there exactly once."""
    train = find_function(tree, "NetworkTrainer.train")
    ast_utils.require_variables(train, LOCALS)
    find, insert = ast_utils.find_statement, ast_utils.insert
    resume = ast_utils.find_call(train, "resume_from_local_or_hf_if_specified")
    at_first = find(train, ast.Expr, AT_FIRST, prefix=True)
    insert(
        train,
        resume,
        before="_hangproof_run.register_hooks(accelerator)",
        after="steps_from_state = _hangproof_run.after_load(args, steps_from_state, train_dataloader)",
    )
    assert isinstance(at_first.value, ast.Call)
    at_first.value.args[2:4] = [
        ast.Starred(ast_utils.parse_expression("_hangproof_run.missing_samples(args)"), ast.Load())
    ]
    # Else a schedule-free optimizer converts its weights there and back, which rounds them.
    body = ast_utils.enclosing_body(train, at_first)
    place = body.index(at_first)
    for call, needless in ((body[place - 1], "args.resume"), (body[place + 1], "_hangproof_run.finished(args)")):
        text = ast.unparse(call)
        if isinstance(call, ast.Expr) and text in ("optimizer_eval_fn()", "optimizer_train_fn()"):
            call.value = ast_utils.parse_expression(f"{needless} or {text}")
    rewrite_loops(train, "skipped_dataloader or train_dataloader", "current_step")
    batches = find(train, ast.For, "for (step, batch) in _hangproof_run.iterate_batches(", prefix=True)
    validation = ast.unparse(find(train, ast.If, VALIDATION, prefix=True))
    left = "if validation_steps > 0 and _hangproof_run.validation_is_left(args):"
    insert(train, batches, before=validation.replace(VALIDATION, left, 1))
    ast_utils.insert_import(tree, "from sd_scripts_patches.resume import run as _hangproof_run")
    return tree


def rewrite_loops(function: ast.FunctionDef, loader: str, current_step: str) -> None:
    """Insert the calls to `run` into the loops over epochs and batches of `loader`."""
    find, insert = ast_utils.find_statement, ast_utils.insert
    epochs = find(function, ast.For, "for epoch in range(epoch_to_start, num_train_epochs)")
    batches = find(epochs, ast.For, f"for (step, batch) in enumerate({loader})")
    count = find(batches, ast.AugAssign, "global_step += 1")
    record = find(batches, ast.Expr, "loss_recorder.add(", prefix=True)
    insert(
        function,
        epochs,
        before="epoch_to_start, global_step = _hangproof_run.begin_training("
        f"args, train_dataloader, loss_recorder, progress_bar, {current_step}, epoch_to_start, global_step)",
    )
    insert(function, batches, after="_hangproof_run.epoch_over = True")
    insert(function, count, after="_hangproof_run.after_step(global_step, epoch, step, loss)")
    insert(function, record, after="_hangproof_run.after_loss_recorded()")
    batches.iter = ast_utils.parse_expression(f"_hangproof_run.iterate_batches({loader}, epoch)")
