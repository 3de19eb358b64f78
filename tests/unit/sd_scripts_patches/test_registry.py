"""Which patches a trainer gets."""

from sd_scripts_patches import compatibility, registry


def test_the_shared_patches_keep_only_what_is_installed():
    for one in registry.patches(compatibility.MUSUBI):
        assert not [target for target in one.targets if target.module.startswith(("library.", "networks."))]
    assert {one.name for one in registry.patches(compatibility.MUSUBI)} == set(registry.MUSUBI_NAMES)
