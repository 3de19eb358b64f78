"""How many steps a run takes, as its trainer counts them: repeats of folders, what is held out, batches by bucket.

Both of kohya's trainers and the built-in one fill each bucket's batches apart, so the last batch of a bucket may be
smaller: with batch sizes above 1 the number is exact only where the buckets are known. sd-scripts and the built-in
trainer share buckets among the folders of a data set; musubi-tuner has those of each folder apart.

Sources: sd-scripts, `split_train_val` and `DreamBoothDataset` in library/train_util.py (v0.10.1), `max_train_steps` in
train_network.py; musubi-tuner, `BucketBatchManager` in image_video_dataset.py; trainer/validation.py and data_order.py.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

Images = Mapping[str, int] | Mapping[str, Sequence[Hashable]]
"""By folder of the data set: the number of images, or the bucket of each image where they are known."""


def repeats_of(folder: str) -> tuple[int, str] | None:
    """The repeats and the subject that a folder's name sets, such as (10, "cat") for `10_cat`; None where it sets none.

    The innermost folder of a path with such a name decides.
    """
    for part in reversed(folder.split("/")):
        found = re.fullmatch(r"([0-9]{1,4})_(.*)", part, re.DOTALL)
        if found and int(found[1]):
            subject = re.sub(r"^weight-(?:[2-9]|10)(?:-|$)", "", found[2])
            return int(found[1]), " ".join(subject.replace("\0", " ").split())
    return None


def weight_of(folder: str) -> tuple[int, str]:
    """The weight of the images in a subfolder of a data set, and the subfolder that they are from, such as (3,
    "10_cat") for `30_weight-3-cat`; (1, folder) for any other name."""
    found = re.fullmatch(r"(?:([1-9][0-9]{0,3})_)?weight-([2-9]|10)(?:-(.+))?", folder)
    if not found or (found[1] and int(found[1]) % int(found[2])):
        return 1, folder
    weight, rest = int(found[2]), found[3] or ""
    return weight, f"{int(found[1]) // weight}_{rest}" if found[1] else rest


def repeats_in(folder: str, repeats: int) -> int:
    """How often an epoch shows each image of a subfolder; `repeats` is what images without a folder have."""
    own = repeats_of(folder)
    return own[0] if own else repeats * weight_of(folder)[0]


def held_out(images: Mapping[str, int], share: float, backend: str) -> dict[str, int]:
    """How many images of each folder validate and are not trained on.

    The share of each folder is rounded: sd-scripts may hold out none, the built-in trainer (`diffusers`) at least one.
    """
    held = {name: round(number * share) for name, number in images.items()}
    if share and backend == "diffusers" and not any(held.values()) and sum(images.values()) > 1:
        held[max(images, key=lambda name: images[name])] = 1
    return held


def batches(images: Images, repeats: int, batch_size: int, share: float, backend: str) -> int:
    """The batches of one epoch, over all processes.

    Which images are held out is not known here: with a share and known buckets, the largest buckets lose them.
    """
    numbers = {name: found if isinstance(found, int) else len(found) for name, found in images.items()}
    held = held_out(numbers, share, backend)
    shown: Counter[tuple[str, Hashable]] = Counter()
    for name, found in images.items():
        group = name if backend == "musubi" else ""
        members: Counter[Hashable] = Counter({"": found}) if isinstance(found, int) else Counter(found)
        for _ in range(held[name]):
            members[max(members, key=lambda bucket: members[bucket])] -= 1
        for bucket, number in members.items():
            shown[group, bucket] += number * repeats_in(name, repeats)
    return sum(math.ceil(number / batch_size) for number in shown.values())


def planned_steps(run: Mapping[str, Any], images: Images) -> int:
    """The optimizer steps of a run (the fields of a RunSpec): its maximum, or those of its epochs."""
    if run.get("max_train_steps"):
        return int(run["max_train_steps"])
    share = run.get("validation_split", 0.0)
    in_epoch = batches(images, run["repeats"], run["batch_size"], share, run["backend"])
    processes = run["gpus"] * run.get("nodes", 1)
    return run["epochs"] * math.ceil(in_epoch / processes / run["gradient_accumulation"])
