"""The tables, and the flags that are read from the trainers' sources."""

import presets


def test_every_model_file_can_be_downloaded_or_is_generated():
    for key, model in presets.models().items():
        by_file = [b for b in model["backends"] if presets.backends()[b]["loads"] == "files"]
        for backend in by_file:
            needs = presets.trainer_of(key, backend)["needs"]
            assert set(model["files"]) <= set(needs) and set(needs) - set(model["files"]) <= {"base_weights"}, key
        if not model["generated"]:
            files = [shard for name in model["files"].values() for shard in presets.tables.shards(name)]
            sources = {name: presets.tables.downloads()[name] for name in files}
            assert all(one["repo"].count("/") == 1 and one["path"] and one["size"] > 1e8 for one in sources.values())
        assert model["licence"] not in ("", "unknown") and model["name"] and model["note"].endswith(".")


def test_a_file_in_several_parts_is_downloaded_as_a_whole():
    names = presets.tables.shards("qwen_3_8b-00001-of-00004.safetensors")
    assert names == [f"qwen_3_8b-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    for n, name in enumerate(names, 1):
        assert presets.tables.downloads()[name]["path"] == f"text_encoder/model-{n:05d}-of-00004.safetensors"
    assert presets.tables.shards("ae.safetensors") == ["ae.safetensors"]
