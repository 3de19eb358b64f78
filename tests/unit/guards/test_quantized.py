from guards import quantized


def test_a_copy_that_cannot_be_written_is_reported_once_and_hinders_nothing(tmp_path, capsys):
    weights = tmp_path / "flux.safetensors"
    weights.write_bytes(b"weights")
    (tmp_path / quantized.FOLDER).write_text("in the way of the folder")
    copy = quantized.Copy(tmp_path, [weights], "float8")
    copy.begin(1)
    copy.add("weight", None)
    copy.finish()
    copy.give_up()
    said = capsys.readouterr().out
    assert said.count("each start casts them") == 1 and str(tmp_path / quantized.FOLDER) in said
    assert not copy.path.exists()
