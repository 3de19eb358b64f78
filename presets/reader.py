"""Reads a script of any language: its commands, and how a value is written in it."""

import re
import shlex

from presets import windows
from presets.shell import Bash
from presets.syntax import Command


def dialect(name: str, text: str) -> str:
    """`cmd` for batch files, `ps` for PowerShell, else `sh`."""
    if name.lower().endswith(".ps1"):
        return "ps"
    batch = name.lower().endswith((".bat", ".cmd")) or re.match(r"\s*@?echo off", text, re.IGNORECASE)
    return "cmd" if batch else "sh"


def commands(text: str, language: str) -> list[Command]:
    """The commands of a script, in order."""
    return Bash(text).commands() if language == "sh" else windows.Reader(text, language).commands()


def quote(value: str, language: str) -> str:
    """A value as a word of the language; PowerShell is only read."""
    return windows.quote(value) if language == "cmd" else shlex.quote(value)
