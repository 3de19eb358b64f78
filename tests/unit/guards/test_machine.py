"""The memory that is left, on the machine and in a container."""

from guards import machine


def test_memory_of_a_container_is_the_smaller_one(tmp_path, monkeypatch):
    group = tmp_path / "cgroup/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000000")
    (group / "memory.current").write_text("700000")
    (group / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/box\n")
    (tmp_path / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable: 5000 kB\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert machine.available_bytes() == 500_000
    (group / "memory.max").write_text("max")
    assert machine.available_bytes() == 5_120_000
