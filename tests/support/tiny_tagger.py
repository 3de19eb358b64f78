"""A tagger of seven tags in a folder, in the layout of the real ones."""

from pathlib import Path

import numpy
import onnx.parser

TAGS = [("general", 9), ("long_hair", 0), ("blue_sky", 0), ("o_o", 0), ("red", 0)]
TAGS += [("alice_(wonderland)", 4), ("solo", 0)]


def tagger_model(folder: Path, channels_first: bool = False) -> Path:
    """A model whose first tags are as probable as the image is blue, green and red, the others by their number."""
    folder.mkdir(parents=True, exist_ok=True)
    shape, axes = ("3, 8, 8", "2, 3") if channels_first else ("8, 8, 3", "1, 2")
    weights, bias = numpy.zeros((3, len(TAGS))), numpy.linspace(0, 1, len(TAGS))
    weights[range(3), range(1, 4)], bias[1:4] = 1 / 255, 0
    found = f"""<ir_version: 10, opset_import: ["" : 18]>
        tagger (float[1, {shape}] image) => (float[1, {len(TAGS)}] tags)
        <int64[2] axes = {{{axes}}}, float[3, {len(TAGS)}] weights = {{{", ".join(map(str, weights.flat))}}},
         float[{len(TAGS)}] bias = {{{", ".join(map(str, bias))}}}>
        {{ mean = ReduceMean <keepdims = 0> (image, axes)
           found = MatMul (mean, weights)
           tags = Add (found, bias) }}"""
    model = onnx.parser.parse_model(found)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    rows = [f"{number},{name},{category},1" for number, (name, category) in enumerate(TAGS)]
    (folder / "selected_tags.csv").write_text("\n".join(["tag_id,name,category,count", *rows, ""]))
    return folder
