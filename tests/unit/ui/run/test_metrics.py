"""What is read of metrics.jsonl: from where the last read ended, in parts, and each step once."""

import os

from ui_helpers import metrics_line as line

from ui.run import metrics, view


def losses(folder) -> dict[int, float]:
    return view.with_metrics(folder, lambda found: dict(zip(found.steps["step"], found.steps["loss"], strict=True)))


def test_metrics_are_read_from_where_the_last_read_ended(folder):
    path = folder / "metrics.jsonl"
    assert losses(folder) == {}
    path.write_text("".join(line(s, 1 / s) for s in (1, 2, 4)) + '{"kind":"gpu"}\n{"kind":"step","st')
    assert list(losses(folder)) == [1, 2, 4]
    revision = view.with_metrics(folder, lambda found: found.revision)
    assert view.with_metrics(folder, lambda found: found.revision) == revision, "nothing was added"
    assert metrics.Metrics(path).update().revision == revision, "a page of the server before asks"
    with path.open("a") as file:
        file.write('ep":5,"loss":0.25}\n')
    assert losses(folder) == {1: 1.0, 2: 0.5, 4: 0.25, 5: 0.25}
    assert metrics.Metrics(path).update().revision != revision
    path.unlink()
    path.write_text(line(1, 5.0))
    os.utime(path)
    assert losses(folder) == {1: 5.0}
    # The run was deleted and made again, and its file got the number of the old one.
    (folder / "run.toml").write_text('name = "r"\nrank = 8\n')
    path.write_text("".join(map(line, (1, 2, 3))))
    assert losses(folder) == {1: 0.5, 2: 0.5, 3: 0.5}


def test_a_restart_replaces_the_steps_that_it_repeats_and_a_long_history_is_read_in_parts(folder, monkeypatch):
    monkeypatch.setattr(metrics, "READ_BYTES", 1000)
    first = [line(s, 1.0, 1, s) for s in range(1, 26)]
    second = [line(s, 2.0, 2, 60 + s) for s in range(21, 24)]
    (folder / "metrics.jsonl").write_text("".join(first + second))
    assert losses(folder) == {**dict.fromkeys(range(1, 21), 1.0), **dict.fromkeys(range(21, 24), 2.0)}
    with (folder / "metrics.jsonl").open("a") as file:  # stopped at a checkpoint, and continued: no step is repeated
        file.write("".join(line(s, 3.0, 3, 120 + s) for s in range(24, 27)))
    found = view.with_metrics(folder, lambda one: (list(one.steps["step"]), one.restarts))
    assert found == (list(range(1, 27)), [21, 24])
