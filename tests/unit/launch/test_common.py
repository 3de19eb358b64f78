"""What the commands of launch share: their templates. The commands' own tests have each kind of argument."""

from launch import common


def test_a_template_has_the_sections_that_were_asked_for_and_no_name_is_left():
    built_in, other = (common.fill("bundle.sh", *names, slug="cat", modules="torch") for names in (["builtin"], []))
    assert "# Trains cat, supervised" in other and "import torch" in other and "@SLUG@" not in other
    assert "TRAINER_PYTHON" in built_in and "TRAINER_PYTHON" not in other and "#[" not in built_in + other
