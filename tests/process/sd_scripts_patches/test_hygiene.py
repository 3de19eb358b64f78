"""Process-wide settings: output, git."""

import time
from types import ModuleType

import children
import patches_helpers as helpers

from sd_scripts_patches import hygiene


def test_git_that_does_not_answer_is_left(monkeypatch, capsys):
    monkeypatch.setenv("HANGPROOF_GIT_TIMEOUT_S", "0.3")
    module = ModuleType("library.train_util")
    module.get_git_revision_hash = lambda: time.sleep(3600)
    helpers.apply(hygiene.PATCH, module)
    assert module.get_git_revision_hash() == "(unknown)"
    assert "waited 0.3 s for git rev-parse" in capsys.readouterr().err


HYGIENE = r"""
import os, sys
from sd_scripts_patches import hygiene
hygiene.prepare(worker=False)
print("caption: caf\u00e9 \u2192 \u732b", sys.stdout.encoding, sys.stdout.line_buffering)
print(*(os.environ[n] for n in ("TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED", "PYTHONUTF8")))
"""


def test_output_is_utf8_and_unbuffered_and_tokenizers_start_no_threads(monkeypatch):
    """In an ASCII environment, in which a caption would end the run."""
    for name in ("PYTHONUNBUFFERED", "PYTHONUTF8", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    done = children.run(HYGIENE, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE=0)
    assert done.stdout == "caption: caf\u00e9 \u2192 \u732b utf-8 True\nfalse 1 1\n", done.stderr
