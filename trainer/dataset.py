"""Reads the data set: `dataset.toml` in sd-scripts' format, images and captions, as a list of `Image`s.

All errors are reported before a model is loaded: a data set with a bad image must fail in the first second, not after
ten minutes of encoding. Unknown keys are refused by name, and also keys that would change images or captions from step
to step, because these are cached once: of a shuffled caption, a few orders.
"""

import difflib
import random
import struct
from dataclasses import dataclass
from pathlib import Path

import tomllib

from trainer.buckets import Rules, Size, place
from trainer.errors import TrainError

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
Keys = dict[str, tuple[type, ...]]  # the types that the value of a key may have
DATASET_KEYS: Keys = {
    "resolution": (int, list),
    **dict.fromkeys(("enable_bucket", "bucket_no_upscale"), (bool,)),
    **dict.fromkeys(("batch_size", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"), (int,)),
}
TEXT_KEYS = ("image_dir", "class_tokens", "caption_extension", "caption_prefix", "caption_suffix", "caption_separator")
SUBSET_KEYS: Keys = {
    "caption_dropout_rate": (int, float),
    **dict.fromkeys(("alpha_mask", "shuffle_caption"), (bool,)),
    **dict.fromkeys(("num_repeats", "keep_tokens"), (int,)),
    **dict.fromkeys(TEXT_KEYS, (str,)),
}
# keys of sd-scripts that are accepted only when they are off (false, 0, "")
NEUTRAL_KEYS = (
    "flip_aug color_aug random_crop face_crop_aug_range is_reg enable_wildcard cache_info validation_split debug_dataset "
    "caption_dropout_every_n_epochs caption_tag_dropout_rate token_warmup_step keep_tokens_separator "
    "secondary_separator"
)
# keys of sd-scripts without effect here
IGNORED_KEYS = "token_warmup_min validation_seed"
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a table"}
ORDERS = 8  # of a caption's tags, with shuffle_caption: each is encoded once
SIZE_MULTIPLE = 16  # 8 of the VAE × 2 of the transformer's patches
# raised by Pillow on damaged files, found by fuzzing
DAMAGE = (OSError, ValueError, SyntaxError, EOFError, struct.error)


@dataclass(frozen=True)
class Image:
    """A training image: file, caption, repeats per epoch, bucket, and size before the crop (pixels).

    masked: its alpha channel says what is trained (`alpha_mask`). size: of the file, in pixels. orders: its caption
    with the tags in other orders. dropout: the share of its uses without a caption. deep: its grey has 16 bits.
    """

    path: Path
    caption: str
    repeats: int
    bucket: Size
    resized: Size
    dataset: int
    batch_size: int
    masked: bool = False
    size: Size = (0, 0)
    orders: tuple[str, ...] = ()
    dropout: float = 0.0
    deep: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All that is encoded for it: its caption, the other orders, and "" where it is dropped."""
        return (self.caption, *self.orders, *([""] if self.dropout else []))

    @property
    def told(self) -> tuple[int, ...]:
        """What SDXL is told: height and width of the image, top and left of its crop, height and width of the bucket.

        The crop is the one that sd-scripts tells (train_util.py, BucketManager.get_crop_ltrb).
        """
        (width, height), (across, down) = self.size, self.bucket
        left = max(0, int((across - down * width / height) // 2))
        top = max(0, int((down - across * height / width) // 2))
        return height, width, top, left, down, across


def read(config: Path, args) -> list[Image]:
    """All images of a dataset.toml. The command line has the defaults of missing keys.

    Raises: TrainError with the file, the key or the image that is wrong.
    """
    try:
        text = config.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise TrainError(f"--dataset_config {config}: {problem.strerror}; correct the path") from problem
    except UnicodeDecodeError as problem:
        raise TrainError(f"--dataset_config {config}: not UTF-8 text; save the file as UTF-8") from problem
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise TrainError(f"{config}: not valid TOML: {problem}; fix this line") from problem
    check_keys(config, "the file", table, {"general": (dict,), "datasets": (list,)})
    general = table.get("general", {})
    check_keys(config, "[general]", general, DATASET_KEYS | SUBSET_KEYS)
    images: list[Image] = []
    for number, dataset in enumerate(table.get("datasets", [])):
        check_keys(config, "[[datasets]]", dataset, DATASET_KEYS | SUBSET_KEYS | {"subsets": (list,)})
        for subset in dataset.get("subsets", []):
            check_keys(config, "[[datasets.subsets]]", subset, SUBSET_KEYS)
            images += read_subset(config, {**general, **dataset, **subset}, args, number)
    if not images:
        raise TrainError(f"{config}: no images; add [[datasets]] with [[datasets.subsets]] and an image_dir")
    return images


def check_keys(config: Path, where: str, table: dict, known: Keys) -> None:
    """Raises: TrainError for a key that is unknown, not supported here, or of another type. where: the table's name."""
    if not isinstance(table, dict):
        raise TrainError(f"{config}: {where} is {table!r}; write a table of keys and values")
    for key, value in table.items():
        if key in IGNORED_KEYS.split():
            continue
        if key in NEUTRAL_KEYS.split():
            if value:
                raise TrainError(
                    f"{config}: {where} {key} = {value!r}: not supported by the built-in trainer; remove it"
                )
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "remove it"
            raise TrainError(f"{config}: {where} has an unknown key {key!r}; {hint}")
        if not isinstance(value, known[key]) or (isinstance(value, bool) and bool not in known[key]):
            kinds = " or ".join(KINDS[kind] for kind in known[key])
            raise TrainError(f"{config}: {where} {key} = {value!r}: must be {kinds}")


def rules_of(config: Path, table: dict, args) -> Rules:
    """The buckets of a subset, by its merged tables and the flags. Raises: TrainError for sizes that do not fit."""
    resolution = table.get("resolution", args.resolution)
    if resolution is None:
        raise TrainError(f"{config}: no resolution; add `resolution = 512` under [[datasets]]")
    if isinstance(resolution, str):
        try:
            resolution = [int(part) for part in resolution.split(",")]
        except ValueError as problem:
            raise TrainError(
                f"--resolution {resolution!r}: must be SIZE or WIDTH,HEIGHT; write for example 512 or 768,512"
            ) from problem
    sizes = [resolution] if isinstance(resolution, int) else resolution
    if len(sizes) not in (1, 2) or not all(type(size) is int for size in sizes):
        raise TrainError(
            f"{config}: resolution {resolution!r}: must be one number, or width and height, such as [768, 512]"
        )
    width, height = sizes[0], sizes[-1]
    get = lambda key: table.get(key, getattr(args, key))  # noqa: E731
    bucketed, step = get("enable_bucket"), get("bucket_reso_steps")
    sides = (step,) if bucketed else (width, height)
    wrong = [n for n in (*sides, width, height) if n < SIZE_MULTIPLE] + [n for n in sides if n % SIZE_MULTIPLE]
    if wrong:
        raise TrainError(f"{config}: {wrong[0]} pixels: sizes must be multiples of {SIZE_MULTIPLE}")
    if bucketed and step * step > width * height:
        raise TrainError(
            f"{config}: bucket_reso_steps {step}: too large for resolution {resolution}; use a smaller one"
        )
    # multiples of the step, as in sd-scripts (train_util.py, adjust_min_max_bucket_reso_by_steps)
    return Rules(
        resolution=(width, height),
        enable_bucket=bucketed,
        min_bucket_reso=max(step, min(get("min_bucket_reso"), width, height) // step * step) if bucketed else 0,
        max_bucket_reso=-(-max(get("max_bucket_reso"), width, height) // step) * step if bucketed else 0,
        bucket_reso_steps=step,
        bucket_no_upscale=get("bucket_no_upscale"),
    )


def read_subset(config: Path, table: dict, args, number: int) -> list[Image]:
    """The images of a subset. table: its keys and those around it; number: its dataset's. Raises: TrainError."""
    rules = rules_of(config, table, args)
    if "image_dir" not in table:
        raise TrainError(f"{config}: [[datasets.subsets]] without an image_dir; add one")
    folder = Path(table["image_dir"])
    if not folder.is_dir():
        raise TrainError(f"{config}: image_dir '{folder}' does not exist; create it or fix the path")
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in EXTENSIONS and not p.name.startswith("."))
    if not paths:
        raise TrainError(f"{config}: image_dir '{folder}' has no images ({', '.join(EXTENSIONS)}); add images")
    repeats, batch_size = table.get("num_repeats", 1), table.get("batch_size", args.train_batch_size)
    if repeats < 1 or batch_size < 1:
        raise TrainError(f"{config}: num_repeats {repeats}, batch_size {batch_size}: both must be 1 or more")
    dropout = float(table.get("caption_dropout_rate", args.caption_dropout_rate))
    if not 0 <= dropout < 1:
        raise TrainError(f"{config}: caption_dropout_rate {dropout}: must be 0 or more and less than 1, such as 0.1")
    out = []
    for path in paths:
        size, transparent, deep = header_of(path)
        masked = transparent and table.get("alpha_mask", False)
        caption = caption_of(path, table, args)
        orders = orders_of(caption, path.name, table, args)
        about = (repeats, *place(rules, size), number, batch_size, masked, size, orders, dropout, deep)
        out.append(Image(path, caption, *about))
    return out


def header_of(path: Path) -> tuple[Size, bool, bool]:
    """Width and height after EXIF rotation, whether there is transparency, and whether its grey has 16 bits; reads the
    header only."""
    from PIL import Image as Pillow, UnidentifiedImageError

    if path.exists() and not path.is_file():  # a pipe would be read for ever
        raise TrainError(f"{path}: not a regular file; remove it")
    try:
        with Pillow.open(path) as image:
            width, height = image.size
            if image.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # Orientation: rotated by 90 degrees
                width, height = height, width
            transparent, deep = image.has_transparency_data, image.mode.startswith("I")
    except UnidentifiedImageError as problem:
        raise TrainError(f"{path}: Not a readable image. Export it as JPEG or PNG.") from problem
    except (*DAMAGE, Pillow.DecompressionBombError) as problem:
        raise TrainError(unreadable(path, problem)) from problem
    return (width, height), transparent, deep


def unreadable(path: Path, problem: Exception) -> str:
    """The message about an image that cannot be read."""
    fewer = " with fewer pixels" if type(problem).__name__ == "DecompressionBombError" else ""
    return f"{path}: the image cannot be read: {problem}; export it again as JPEG or PNG{fewer}, or remove it"


def caption_of(path: Path, table: dict, args) -> str:
    """First line of the caption file, else class_tokens, with prefix and suffix, as in sd-scripts."""
    file = path.parent / (path.stem + table.get("caption_extension", args.caption_extension))
    if file.is_file():
        wrong = f"{file}: not UTF-8 text; save the file as UTF-8"
        try:
            caption = file.read_text(encoding="utf-8-sig").split("\n")[0].strip()
        except UnicodeDecodeError as problem:
            raise TrainError(wrong) from problem
        if "\0" in caption:  # UTF-16 without its mark
            raise TrainError(wrong)
    elif "class_tokens" in table:
        caption = table["class_tokens"]
    else:
        raise TrainError(f"{path}: no caption; write {file.name} beside it, or set class_tokens in dataset.toml")
    before, after = (table.get(f"caption_{end}", getattr(args, f"caption_{end}")) for end in ("prefix", "suffix"))
    return " ".join(part for part in (before, caption, after) if part)


def orders_of(caption: str, name: str, table: dict, args) -> tuple[str, ...]:
    """A caption with its tags in other orders, when they are shuffled; `keep_tokens` of them stay at the beginning."""
    if not table.get("shuffle_caption", args.shuffle_caption):
        return ()
    separator = table.get("caption_separator", args.caption_separator)
    tags = [tag.strip() for tag in (caption.split(separator) if separator else [caption])]
    keep = table.get("keep_tokens", args.keep_tokens)
    draw = random.Random(name.encode("utf-8", "surrogateescape"))
    found = [", ".join([*tags[:keep], *draw.sample(tags[keep:], len(tags[keep:]))]) for _ in range(ORDERS)]
    return tuple(dict.fromkeys(found))


def pixels_and_mask(image: Image):
    """The pixels to train on, uint8 [height, width, 3] of the bucket's size, and the mask, float32 [height, width] from
    0 to 1; None without one.

    The colours below a mask stay as they are: the model sees the whole image, and only the loss leaves a part out.
    """
    import numpy as np
    from PIL import Image as Pillow, ImageOps

    alpha = None
    try:
        with Pillow.open(image.path) as opened:
            picture = ImageOps.exif_transpose(opened)
            if picture.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion makes all above 255 white
                picture = picture.convert("F").point(lambda value: value * (255 / 65535)).convert("L")
            elif picture.has_transparency_data:
                picture = picture.convert("RGBA")
                if image.masked:
                    alpha = picture.getchannel("A")
                else:
                    picture = Pillow.alpha_composite(Pillow.new("RGBA", picture.size, "white"), picture)
            picture = picture.convert("RGB")
    except (*DAMAGE, Pillow.DecompressionBombError) as problem:
        raise TrainError(unreadable(image.path, problem)) from problem
    # scaled apart: Pillow multiplies colours by alpha when it scales both, which makes the ignored part black
    mask = None if alpha is None else np.asarray(to_bucket(image, alpha), dtype=np.float32) / 255
    return np.asarray(to_bucket(image, picture)), mask


def to_bucket(image: Image, picture):
    """A Pillow image scaled to cover the bucket and cropped at its centre."""
    from PIL import Image as Pillow

    if picture.size != image.resized:
        smaller = picture.width > image.resized[0]
        picture = picture.resize(image.resized, Pillow.Resampling.BOX if smaller else Pillow.Resampling.LANCZOS)
    left, top = (image.resized[0] - image.bucket[0]) // 2, (image.resized[1] - image.bucket[1]) // 2
    return picture.crop((left, top, left + image.bucket[0], top + image.bucket[1]))
