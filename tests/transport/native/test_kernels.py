"""The kernels in C on other processors than this one: what their vectors compile to, and who says
which one it is.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from operators.engine.native import attention as engine
from transport.compile import PROCESSOR, compiled, compilers_caches
from transport.native import build as transport

KERNELS = {
    "copies and sums": ((Path(transport.__file__).with_name("kernels.c"),), transport.FLAGS),
    "differences": ((Path(transport.__file__).with_name("delta.c"),), transport.FLAGS),
    "engine": (tuple(engine.FOLDER / name for name in engine.SOURCES), (*engine.FLAGS, "-fopenmp")),
}


LEVELS = ["x86-64", "sandybridge", "x86-64-v3", "x86-64-v4"]


"""Integers have vectors of 16 bytes twice, without AVX and with it, of 32 with AVX2, of 64 with
AVX-512."""


GCC = shutil.which("gcc")


@pytest.mark.skipif(GCC is None or platform.machine() != "x86_64", reason="needs gcc on x86-64")
@pytest.mark.parametrize(
    "level",
    [
        level if level == "x86-64-v3" else pytest.param(level, marks=pytest.mark.slow)
        for level in LEVELS
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_no_vector_is_wider_than_the_processors_registers(kernels, level, tmp_path):
    sources, flags = KERNELS[kernels]
    told = ["-Wvector-operation-performance", "-Werror=vector-operation-performance"]
    options = [GCC, *flags, f"-march={level}", *told]
    passed = passes(sources, options)
    if passed.exists():
        return
    command = [*options, "-c", str(sources[0]), "-o", str(tmp_path / "kernels.o")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    passed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    passed.touch()


def passes(sources: tuple[Path, ...], options: list[str]) -> Path:
    """A file of the user's cache, there once this compiler has compiled these sources with these
    options.
    """
    known = [*(source.read_text("utf-8") for source in sources), *options, version()]
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataflow-rl" / "vectors"
    )
    return folder / hashlib.sha256("\n".join(known).encode()).hexdigest()[:32]


@functools.cache
def version() -> str:
    return subprocess.run(
        [GCC, "-v"], capture_output=True, text=True, timeout=20, check=True
    ).stderr


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A C file that no other test compiles, and a cache of its own."""
    if transport.library() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "wide.c"
    path.write_text(
        "#ifdef __AVX512F__\nint wide(void) { return 64; }\n#else\nint wide(void) { return 0;"
        " }\n#endif\n"
    )
    return path


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86-64")
def test_kernels_are_compiled_for_the_processor_that_is_named(source, monkeypatch):
    found = {}
    for level in ("x86-64-v3", "x86-64-v4"):
        monkeypatch.setenv(PROCESSOR, level)
        found[level] = compiled.__wrapped__((source,), (("-O1",),)).wide()
    assert found == {"x86-64-v3": 0, "x86-64-v4": 64}


def test_there_are_no_kernels_where_none_are_asked_for(source, monkeypatch):
    monkeypatch.setenv(PROCESSOR, "none")
    assert compiled.__wrapped__((source,), (("-O1",),)) is None


def test_a_processor_that_the_compiler_does_not_know_is_refused(source, monkeypatch):
    monkeypatch.setenv(PROCESSOR, "abacus")
    with pytest.raises(
        ValueError, match=r"wide\.c cannot be compiled for DATAFLOW_MARCH=abacus; found .+; name a"
    ):
        compiled.__wrapped__((source,), (("-O1",),))


@pytest.fixture(params=["takes no files", "cannot be made", "no home"])
def no_cache(request, tmp_path, source, monkeypatch):
    """The user's cache folder is none; temporary files go to a folder of their own, in which this
    is the other one.
    """
    (tmp_path / "read-only").mkdir()
    (tmp_path / "read-only" / "dataflow-rl").symlink_to("/proc", target_is_directory=True)
    places = {"takes no files": tmp_path / "read-only", "cannot be made": source}
    if request.param in places:
        monkeypatch.setenv("XDG_CACHE_HOME", str(places[request.param]))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / f"dataflow-rl-{os.getuid()}"


def test_where_the_cache_folder_takes_no_files_kernels_are_compiled_into_another_once(
    no_cache, source, monkeypatch
):
    assert compiled.__wrapped__((source,), (("-O1",),)) is not None
    (made,) = no_cache.glob("wide-*.so")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is compiled again"))
    assert compiled.__wrapped__((source,), (("-O1",),)) is not None
    assert compilers_caches() == {
        "TRITON_CACHE_DIR": f"{made.parent}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{made.parent}/inductor",
    }


def test_nothing_is_run_from_a_folder_that_others_could_write(no_cache, source, monkeypatch):
    compiled.__wrapped__((source,), (("-O1",),))
    no_cache.chmod(0o777)
    monkeypatch.setattr("transport.compile._folders", lambda: iter([no_cache]))
    monkeypatch.setattr("transport.compile.NOTES", told := list[str]())
    assert compiled.__wrapped__((source,), (("-O1",),)) is None
    assert "kernels in C are off" in told[0] and f"nothing can be written to {no_cache}" in told[0]


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("false", "cannot compile wide.c"),
        ("no-such-one", "neither no-such-one nor gcc nor clang is on the PATH"),
    ],
)
def test_kernels_that_are_off_are_told_of_with_the_reason(
    compiler, why, source, tmp_path, monkeypatch
):
    (tmp_path / "false").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr("transport.compile.NOTES", told := list[str]())
    assert compiled.__wrapped__((source,), (("-O1",), ("-O2",))) is None
    assert (
        len(told) == 1
        and told[0].startswith("kernels in C are off, and slower ways are taken")
        and why in told[0]
    )


def test_a_compiler_that_knows_less_is_told_of_too(source, monkeypatch):
    monkeypatch.setattr("transport.compile.NOTES", told := list[str]())
    assert compiled.__wrapped__((source,), (("-fno-such-flag",), ("-O1",))) is not None
    assert "compiles wide.c with -O1 alone, and it is slower" in told[0]


def test_a_library_that_is_damaged_is_made_again(source, tmp_path):
    compiled.__wrapped__((source,), (("-O1",),))
    (made,) = (tmp_path / "cache" / "dataflow-rl").glob("wide-*.so")
    whole = made.stat().st_size
    made.unlink()
    made.write_text("half")
    assert compiled.__wrapped__((source,), (("-O1",),)) is not None and made.stat().st_size == whole
