"""Lay what a GPU machine without network lacks into a folder that travels with the tree.

    python -m bench.engine.gpu_bundle            # .bundle: Baton's and vLLM's packages in one archive, about 46 MiB

There, in the project's root and in a shell of its own:

    . .bundle/install.sh

It unpacks into /tmp/site and sets PYTHONPATH. Packages are for Python 3.12 on x86-64, in the versions of
constraints.txt and, for vLLM, those of its own metadata. What they need besides is printed as "needs": it has to be
there already. Of vLLM's compiled libraries those travel that a dense model and Mixtral run on Hopper, with the machine
code of Hopper alone. That of other GPUs is zeros: the driver never reads it, and zeros pack to nothing.
"""

from __future__ import annotations

import argparse
import io
import lzma
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine.vllm_runner import VLLM_VERSION

_ROOT = Path(__file__).parents[2]
_BATON = (
    "grpcio", "grpcio-health-checking", "grpcio-reflection", "httptools", "jsonschema", "jsonschema-specifications",
    "llguidance", "msgspec", "protobuf", "pyzmq", "referencing", "rpds-py", "sniffio", "starlette",
    "uvicorn",
)  # fmt: skip
"""Of the router, the workers, the store and their tests, pinned by constraints.txt."""
_VLLM = (
    "annotated-doc", "annotated-types", "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2",
    "compressed-tensors", "depyf", "dill", "distro", "fastapi", "httpcore2", "httpx2", "jiter", "loguru", "openai",
    "oss-harmony", "partial-json-parser", "pybase64", "pydantic", "pydantic-core", "setproctitle", "truststore",
    "typing-extensions", "typing-inspection", "xgrammar",
)  # fmt: skip
"""What importing vLLM and running a model takes besides."""
_FOR = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
_GLIBC = (5, 17, 24, 26, 27, 28, 31)
_LEFT_OUT = (".so", ".h", ".hpp", ".cuh", ".inl", ".cu", ".cpp", ".js", ".css", ".jpg", "vllm/vllm-rs")
_LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)  # fmt: skip
_EMPTY = "vllm/vllm_flash_attn/_vllm_fa2_C.py"  # FlashAttention 2, 300 MB: imported, and not called on Hopper
_HOPPER = 90
_FATBIN = 0xBA55ED50
_MACHINE_CODE = 2  # the kind of an entry; 1 is PTX

_INSTALL = """\
# Source this: it unpacks what lies beside it into $site, and names that to Python.
site=${site:-/tmp/site}
mkdir -p "$site" && tar -xJf "$(dirname "${BASH_SOURCE[0]}")/site.tar.xz" -C "$site"
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_USE_FLASHINFER_SAMPLER=0  # FlashInfer does not travel
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    arguments.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vllm = arguments.wheel or _download(folder, [f"vllm=={VLLM_VERSION}"])[0]
        with zipfile.ZipFile(vllm) as held:
            wheels = _download(folder, [*_pinned(), *_of_vllm(held)])
        archive = arguments.into / "site.tar.xz"
        archive.write_bytes(lzma.compress(_tar([vllm, *wheels]), preset=6))
        needs = _needs(wheels)
    (arguments.into / "install.sh").write_text(_INSTALL)
    print(f"{archive.stat().st_size / 2**20:.1f} MiB  {archive}")
    print(f"needs: {', '.join(needs)}")
    return 0


def _tar(wheels: Sequence[Path]) -> bytes:
    """What the wheels hold, unpacked; of the first, vLLM's, only what runs on Hopper."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if path != wheels[0] or name in _LIBRARIES or not name.endswith(_LEFT_OUT):
                        content = wheel.read(name)
                        _add(archive, name, for_hopper(content) if name in _LIBRARIES else content)
        _add(archive, _EMPTY, b"")
    return packed.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def for_hopper(library: bytes) -> bytes:
    """Return an ELF library with all but Hopper's machine code in its fat binaries zeroed.

    A fat binary is a header and entries, one after the other. Its header has a magic number, a version, its own length
    and that of all entries. An entry begins with its kind, a version, the length of its header and that of its code.
    The architecture is at byte 28.
    """
    result = bytearray(library)
    place = library.find(_FATBIN.to_bytes(4, "little"))
    while place >= 0:
        _, _, header, length = struct.unpack_from("<IHHQ", library, place)
        entry, end = place + header, place + header + length
        while entry < end:
            kind, _, header, length = struct.unpack_from("<HHIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            if (kind, architecture) != (_MACHINE_CODE, _HOPPER):
                result[entry + header : entry + header + length] = bytes(length)
            entry += header + length
        place = library.find(_FATBIN.to_bytes(4, "little"), end)
    return bytes(result)


def _pinned() -> list[str]:
    """Our own wheels, as constraints.txt pins them."""
    lines = (_ROOT / "constraints.txt").read_text().splitlines()
    pins: dict[str, str] = {canonicalize_name(line.partition("==")[0]): line for line in lines if "==" in line}
    return [pins[name] for name in _BATON]


def _of_vllm(wheel: zipfile.ZipFile) -> list[str]:
    """Wheels for vLLM, within its own bounds."""
    bounds = {canonicalize_name(each.name): str(each.specifier) for each in _requirements(wheel)}
    return [name + bounds.get(canonicalize_name(name), "") for name in _VLLM]


def _requirements(wheel: zipfile.ZipFile) -> Iterator[Requirement]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    for line in HeaderParser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or ():
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate(_FOR):
            yield needed


def _download(into: Path, requirements: Sequence[str]) -> list[Path]:
    """Return the wheels of these for the other machine, without what they need."""
    before = set(into.iterdir())
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "-d", str(into)]
    for platform in (*(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC), "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", platform]
    subprocess.run([*command, *requirements], check=True)
    return sorted(set(into.iterdir()) - before)


def _needs(wheels: Sequence[Path]) -> list[str]:
    """What the wheels need that is not among them in a version that suits."""
    parts = (file.name.split("-") for file in wheels)
    held = {canonicalize_name(name): version for name, version, *_ in parts}
    needs: set[str] = set()
    for file in wheels:
        with zipfile.ZipFile(file) as wheel:
            for each in _requirements(wheel):
                if not each.specifier.contains(held.get(canonicalize_name(each.name), "0"), prereleases=True):
                    needs.add(f"{each.name}{each.specifier}")
                elif canonicalize_name(each.name) not in held:
                    needs.add(each.name)
    return sorted(needs)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Lay what a GPU machine without network lacks into a folder.")
    parser.add_argument("--into", type=Path, default=_ROOT / ".bundle", help="the folder (.bundle)")
    parser.add_argument("--wheel", type=Path, help="vLLM's wheel for CUDA, where it has been downloaded before")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
