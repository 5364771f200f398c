"""How the library of native kernels is made, kept and refused."""

import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.errors import FolderUntrusted
from engine.cpu import build

SOURCE = 'extern "C" int answer() { return %d; }'

compiled = pytest.mark.skipif(not build.can_compile(), reason="nothing can be compiled here")


@compiled
def test_the_kernels_compile_where_they_can():
    """Else every other test of them would quietly be one of torch."""
    assert build.library() is not None


@compiled
def test_a_change_of_the_sources_makes_another_library(tmp_path: Path):
    sources, root = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE % 41)
    assert build.load(sources, root).answer() == 41
    (library,) = root.glob("*/library.so")
    before = library.stat()
    assert build.load(sources, root).answer() == 41
    assert library.stat().st_mtime_ns == before.st_mtime_ns, "made once"
    (sources / "answer.cpp").write_text(SOURCE % 42)
    assert build.load(sources, root).answer() == 42
    (sources / "answer.h").write_text("// headers count too")
    build.load(sources, root)
    assert len(list(root.glob("*/library.so"))) == 3
    assert not list(root.glob("*/making-*"))


@compiled
def test_what_one_that_was_killed_left_half_made_is_removed(tmp_path: Path):
    (tmp_path / "answer.cpp").write_text(SOURCE % 41)
    root = tmp_path / "cache"
    build.load(tmp_path, root)
    (library,) = root.glob("*/library.so")
    library.unlink()
    left = library.with_name("making-killed")
    left.mkdir()
    (left / "answer.o").touch()
    build.load(tmp_path, root)
    assert library.exists()
    assert not left.exists()


@compiled
def test_of_two_processes_that_start_together_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler, log = tmp_path / "compiler", tmp_path / "told"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {" ".join(build.find_compiler())} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE % 43)
    code = (
        "import sys; from pathlib import Path; from engine.cpu import build;"
        "print(build.load(Path(sys.argv[1]), Path(sys.argv[2])).answer())"
    )
    command = [sys.executable, "-c", code, str(sources), str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [one.communicate(timeout=120)[0].strip() for one in both] == ["43", "43"]
    assert log.read_text().count(" -c ") == 1


@compiled
def test_what_others_can_write_to_is_not_loaded(tmp_path: Path):
    sources, root = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE % 44)
    build.load(sources, root)
    (library,) = root.glob("*/library.so")
    library.chmod(0o722)
    with pytest.raises(FolderUntrusted, match=r"library\.so belongs to user \d+ with mode 722"):
        build.load(sources, root)
    library.chmod(0o700)
    root.chmod(0o775)  # a user with write access here can replace the files below
    with pytest.raises(FolderUntrusted, match="cache belongs to user"):
        build.load(sources, root)
    root.chmod(0o700)
    link = tmp_path / "open" / "link"
    link.parent.mkdir()
    link.parent.chmod(0o777)
    link.symlink_to(root)
    with pytest.raises(FolderUntrusted, match="open belongs to user"):
        build.load(sources, link)
    link.parent.chmod(0o1777)  # as /tmp: others can't move what is ours
    assert build.load(sources, link).answer() == 44


@compiled
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_loaded_from(tmp_path: Path):
    (tmp_path / "answer.cpp").write_text(SOURCE % 45)
    root = tmp_path / "theirs" / "cache"
    root.mkdir(parents=True, mode=0o700)
    os.chown(root.parent, 65_534, 65_534)
    with pytest.raises(FolderUntrusted, match="theirs belongs to user 65534"):
        build.load(tmp_path, root)


@compiled
def test_folders_are_made_for_this_user_alone(tmp_path: Path):
    (tmp_path / "answer.cpp").write_text(SOURCE % 46)
    before = os.umask(0o002)
    try:
        assert build.load(tmp_path, tmp_path / "a" / "b").answer() == 46
    finally:
        os.umask(before)
    (library,) = tmp_path.glob("a/b/*/library.so")
    assert {stat.S_IMODE(path.stat().st_mode) for path in list(library.parents)[:3]} == {0o700}


@compiled
@pytest.mark.parametrize("lacks", ["a home", "a cache of its own"])
def test_without_a_safe_place_a_process_compiles_for_itself(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    (tmp_path / "answer.cpp").write_text(SOURCE % 47)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    if lacks == "a home":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    else:
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(0o777)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library = build.library.__wrapped__()
    assert library.answer() == 47
    assert "compiled for this process alone" in caplog.text
    assert not list(tmp_path.glob("baton-native-*"))


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@compiled
def test_what_does_not_compile_says_where(tmp_path: Path):
    (tmp_path / "wrong.cpp").write_text("int answer() { return nonsense; }")
    with pytest.raises(build.LibraryUnavailable, match=r"wrong\.cpp.*nonsense"):
        build.load(tmp_path, tmp_path / "cache")


def test_without_a_compiler_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "cpu_description", lambda: " ".join(build.NEEDED))
    with caplog.at_level(logging.INFO, logger=build.__name__):
        assert build.library.__wrapped__() is None
    assert [record.message for record in caplog.records] == [
        "no native kernels: CXX names no-such-compiler, which is not there; torch does their work"
    ]


def test_a_cpu_without_the_instructions_is_told_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(build, "cpu_description", lambda: "GenuineIntel sse4_2 avx fma")
    with pytest.raises(build.LibraryUnavailable, match="lacks avx2"):
        build.load(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"level": "1\n", "type": "Data\n", "size": "48K\n"}, 48 * 1024),
        ({"level": "1\n", "type": "Instruction\n", "size": "32K\n"}, 0),
        ({"level": "2\n", "type": "Data\n", "size": "512K\n"}, 0),
        ({"level": "1\n", "type": "Data\n", "size": "\n"}, 0),
        ({"level": "1\n", "type": "Data\n"}, 0),
    ],
)
def test_the_size_of_the_first_cache_is_what_the_kernel_tells(files: dict[str, str], expected: int, tmp_path: Path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert build.first_level_cache(tmp_path) == expected


@pytest.mark.skipif(not build.can_compile(), reason="no compiler, or a CPU without kernels")
def test_a_user_is_told_of_the_first_compilation_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.must_compile()
    target = build._target(build.SOURCES, build.cache_root(), build.find_compiler(), build.cpu_description())
    target.parent.mkdir(parents=True)
    target.touch()
    assert not build.must_compile()
