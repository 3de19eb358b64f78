"""Reports what a musubi-tuner process is doing: training, and both caching commands, with the items done.

`train()` calls methods of itself, which are wrapped on the instance. A step is reported by a statement that is inserted
where the training loop counts it. Requests are honored between steps, a stop also between the batches of a caching command.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from guards import crash
from guards.heartbeat import REQUEST_STOP
from sd_scripts_patches import ast_utils, exit as exit_patch, heartbeat as common, session
from sd_scripts_patches.musubi import ACCELERATOR_SETUP, BASE, CACHE_TEXT, LATENTS, LOOP, TRAIN_UTILS
from sd_scripts_patches.patch import Patch, Target, around, find_function, function

CONFIG = "musubi_tuner.dataset.config_utils"

POINTS = {
    "_build_dataset": ("data", "", ""),
    "_prepare_sampling": ("tokenizer", "", ""),
    "_load_dit_and_swap": ("model", "", ""),
    "_build_network": ("network", "", ""),
    "_build_optimizer_and_dataloader": ("loader", "", ""),
    "_prepare_with_accelerator": ("ready", "", ""),
}
"""As `common.POINTS`, for the methods that musubi-tuner's `train` calls."""


class TrainingLoop(common.TrainingLoop):
    """One call of `train()`."""

    util, points = TRAIN_UTILS, POINTS

    def sample_images(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Its samples are also those that were requested."""
        with self.requests.sampling():
            return original(*args, **kwargs)

    def attach(self, trainer: Any) -> None:
        """Wrap the methods of one trainer object."""
        super().attach(trainer)
        trainer._run_training_loop = around(self.run_training_loop)(trainer._run_training_loop)
        trainer.get_lr_scheduler = common._keep_scheduler(trainer.get_lr_scheduler)

    def run_training_loop(self, original: Callable, args: Any, accelerator: Any, *rest: Any, **kwargs: Any) -> Any:
        """Setup is over; the first step follows."""
        self.accelerator = accelerator
        self.beat.phase("first_step")
        self.beat.reach("ready")
        return original(args, accelerator, *rest, **kwargs)


@around
def _first_step_begins(original: Callable, self: Any) -> Any:
    """The training iterates over its batches for the first time; sample images before it iterate over none."""
    beat = session.heartbeat()
    if beat.point in ("ready", "tracker"):
        beat.reach("first_step")
    return original(self)


def _count_items(tqdm: Any) -> Any:
    class CountingTqdm(tqdm):
        """tqdm over batches that reports each image or caption of a batch, and honors a stop request between two."""

        def __iter__(self) -> Iterator[Any]:
            beat, done = session.heartbeat(), 0
            for batch in super().__iter__():
                yield batch
                done += len(batch[1] if isinstance(batch, tuple) else batch)
                beat.item(done)
                if beat.request == REQUEST_STOP:
                    note = f"stopped after {done} cache files; --skip_existing continues from there"
                    session.log(note)
                    exit_patch.exit_process(crash.EXIT_STOPPED, "stopped", note)

    return CountingTqdm


def _caching(phase: str, datasets_at: int) -> Callable[[Callable], Callable]:
    """Put a function that makes caches into its phase. datasets_at: where its data sets are among its arguments."""

    def inside(original: Callable, *args: Any, **kwargs: Any) -> Any:
        datasets = kwargs["datasets"] if "datasets" in kwargs else args[datasets_at]
        counts = [dataset.get_total_image_count() for dataset in datasets if hasattr(dataset, "get_total_image_count")]
        with session.phase(phase, total=sum(count or 0 for count in counts)):
            return original(*args, **kwargs)

    return around(inside)


@around
def _load_begins(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """A caching command reads its data set's configuration first, then loads its model."""
    if session.heartbeat().current_phase == "import":
        session.heartbeat().phase("load")
    return original(*args, **kwargs)


def rewrite(tree: ast.Module) -> ast.Module:
    """Report each step right after the training loop has counted it."""
    loop = find_function(tree, LOOP)
    count = ast_utils.find_statement(loop, ast.AugAssign, "global_step += 1")
    ast_utils.insert(loop, count, after="_hangproof_count(global_step)")
    ast_utils.insert_import(tree, "from sd_scripts_patches.heartbeat import after_step as _hangproof_count")
    return tree


PATCH = Patch(
    name="heartbeat",
    why=common.PATCH.why,
    targets=(
        function(BASE, "NetworkTrainer.train(self, args)", common.follow(TrainingLoop)),
        function(BASE, "NetworkTrainer.process_batch(self, args, accelerator)"),
        function(BASE, "NetworkTrainer.get_lr_scheduler(self, args, optimizer)"),
        function(ACCELERATOR_SETUP, "prepare_accelerator(args)", common.describe_accelerator),
        function(
            common.ACCELERATOR, "Accelerator.init_trackers(self, project_name)", common.at_point("tracker", "ready")
        ),
        function("accelerate.data_loader", "DataLoaderShard.__iter__(self)", _first_step_begins),
        function(ACCELERATOR_SETUP, "collator_class.__init__(self, epoch, dataset)", common._keep_epoch),
        Target(CONFIG, "load_user_config", make=_load_begins),
        *(
            target
            for module, name in LATENTS.items()
            for target in (
                function(module, f"{name}(datasets, encode, args)", _caching("cache_latents", 0), optional=True),
                Target(module, "tqdm", beside=name, make=_count_items, optional=True),
            )
        ),
        function(CACHE_TEXT, "prepare_cache_files_and_paths(datasets)", _caching("cache_text", 0)),
        function(
            CACHE_TEXT,
            "process_text_encoder_batches(num_workers, skip_existing, batch_size, datasets)",
            _caching("cache_text", 3),
        ),
        Target(CACHE_TEXT, "tqdm", beside="process_text_encoder_batches", make=_count_items),
        *(function(TRAIN_UTILS, save, common.at_point(phase="save")) for save in common.SAVES),
        function(common.ACCELERATOR, "Accelerator.end_training(self)", common._in_phase_end),
    ),
    rewrites=((function(BASE, f"{LOOP}(self, args, accelerator)"), rewrite),),
)
