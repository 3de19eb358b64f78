"""A small checkout in sd-scripts' layout with a parser, for tests that must also run without the real one."""

from pathlib import Path

PARSER = """
import argparse

def setup_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ae", type=str, help="path")
    parser.add_argument("--output_dir", type=str)
    parser.add_argument("--network_dim", type=int)
    parser.add_argument("--split_mode", action="store_true")
    parser.add_argument("--optimizer_type", type=str)
    parser.add_argument("--guidance_scale", type=float, default=3.5)
    parser.add_argument("--log_level", choices=["DEBUG", "INFO"], help="Set it / ログ")
    parser.add_argument("--noise_offset", type=float, help="<img src=x onerror='document.title=1'> {{7*7}} ${7*7}")
    parser.add_argument("--betas", type=float, nargs="*")
    return parser
"""


def parser_checkout(folder: Path) -> Path:
    """Write it. Returns the folder."""
    folder.mkdir()
    (folder / "flux_train_network.py").write_text(PARSER, encoding="utf-8")
    return folder
