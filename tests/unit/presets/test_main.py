"""The command `python -m presets` in this process."""

import json

from lint_corpus import fluxgym, lint
from runs_helpers import call


def test_the_command_line_reports_and_fixes(tmp_path):
    script = tmp_path / "train.sh"
    text = fluxgym("12G", samples=True, advanced=["--blocks_to_swap 18"])
    script.write_text(text)
    script.chmod(0o750)
    first = call("presets", "lint", script, "--json")
    findings = json.loads(first.stdout.splitlines()[-1])["findings"]
    assert first.returncode == 1
    assert all(set(f) == {"id", "level", "line", "why", "source", "fix", "fixable"} for f in findings)
    lines = [f["line"] for f in findings if f["id"] == "block-swap"]
    assert text.split("\n")[lines[0] - 1] == "  --blocks_to_swap 18"
    fixed = call("presets", "lint", script, "--fix")
    assert "-  --blocks_to_swap 18" in fixed.stdout and script.stat().st_mode & 0o777 == 0o750
    script.write_bytes("python sd/train_network.py\n".encode("utf-16"))
    code, printed, _ = lint(script)
    assert code == 1 and "UTF-16" in printed and "UTF-8" in printed, "which the shell cannot read"


def test_list_prints_tiers_and_models():
    done = call("presets", "list", "--json")
    value = json.loads(done.stdout.splitlines()[-1])
    assert list(value["tiers"]) == ["8G", "12G", "16G", "20G"] and "tiny-flux" in value["models"]
    row = value["tiers_of"]["z-image"]["musubi"]["8G"]
    assert row["needs_gb"] <= 8 and row["basis"] and row["source"] and row["flags"]["blocks_to_swap"]
    shown = call("presets", "list").stdout
    assert "FLUX.1-dev" in shown and "GPU memory with kohya's sd-scripts: 8G -, 12G 10.8 GB" in shown
