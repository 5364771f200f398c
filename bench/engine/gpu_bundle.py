"""Lay what a GPU machine without network lacks into a folder that travels with the tree.

    python -m bench.engine.gpu_bundle                           # .bundle: wheels, and vLLM's Python without its kernels
    python -m bench.engine.gpu_bundle --into .bundle2 --parts fa3  # vLLM's FlashAttention 3 for Hopper
    python -m bench.engine.gpu_bundle --into .bundle2 --parts c1   # half of the other kernels; then the same with c2

There, in the project's root and in a shell of its own:

    . .bundle/install.sh

It installs into /tmp/site, sets PYTHONPATH, and may be sourced again with a further folder. The wheels are for Python
3.12 on x86-64, in the versions of constraints.txt and, for vLLM, those of its own metadata. What they need besides is
printed as "needs": it has to be there already. Without `c1` and `c2` a module in torch stands in the place of vLLM's
kernels (`bench/engine/vllm_without_kernels.py`), which is right up to rounding, and slow.
"""

from __future__ import annotations

import argparse
import io
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
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
_KERNELS, _FLASH = "vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
_PARTS = ("wheels", "vllm", "fa3", "c1", "c2")

_INSTALL = """\
# Source this: it installs what lies beside it into $site, and names that to Python.
site=${site:-/tmp/site}
bundle=$(dirname "${BASH_SOURCE[0]}")
if ls "$bundle"/*.whl > /dev/null 2>&1; then
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$bundle"/*.whl
fi
mkdir -p "$site.parts" && cp "$bundle"/kernels.*.part "$site.parts" 2> /dev/null
if [ -e "$site.parts/kernels.1.part" ] && [ -e "$site.parts/kernels.2.part" ]; then
    cat "$site.parts"/kernels.?.part > "$site.parts/kernels.tar.xz" && rm "$site.parts"/*.part
fi
for archive in "$bundle"/*.tar.xz "$site.parts"/*.tar.xz; do
    [ ! -e "$archive" ] || python3 -m tarfile -e "$archive" "$site"
done
case ":$PYTHONPATH:" in *":$site:"*) ;; *) export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" ;; esac
export VLLM_USE_FLASHINFER_SAMPLER=0  # FlashInfer does not travel
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    arguments.into.mkdir(parents=True, exist_ok=True)
    for old in (*arguments.into.glob("*.whl"), *arguments.into.glob("*.xz"), *arguments.into.glob("*.part")):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        if "wheels" in arguments.parts:
            _download(arguments.into, _pinned())
        if set(arguments.parts) - {"wheels"}:
            vllm = arguments.wheel or _download(Path(folder), [f"vllm=={VLLM_VERSION}"])[0]
            _lay_vllm(vllm, arguments.into, arguments.parts)
    (arguments.into / "install.sh").write_text(_INSTALL)
    for file in sorted(arguments.into.iterdir()):
        print(f"{file.stat().st_size / 2**20:7.2f} MiB  {file.name}")
    print(f"{sum(file.stat().st_size for file in arguments.into.iterdir()) / 2**20:7.2f} MiB in all")
    if needs := _needs(arguments.into):
        print(f"needs: {', '.join(needs)}")
    return 0


def _lay_vllm(wheel: Path, into: Path, parts: Sequence[str]) -> None:
    with zipfile.ZipFile(wheel) as held:
        if "vllm" in parts:
            _download(into, _of_vllm(held))
            members = [name for name in held.namelist() if not name.endswith(_LEFT_OUT)]
            stub = Path(__file__).with_name("vllm_without_kernels.py").read_bytes()
            # vLLM refuses to start without any FlashAttention, whichever attention runs.
            stand_ins = {f"{_KERNELS.partition('.')[0]}.py": stub, "vllm/vllm_flash_attn/_vllm_fa2_C.py": b""}
            (into / "vllm.tar.xz").write_bytes(_archive(held, members, stand_ins))
        if "fa3" in parts:
            (into / "fa3.tar.xz").write_bytes(_archive(held, [_FLASH]))
        if chosen := [number for number in (1, 2) if f"c{number}" in parts]:
            kernels = _archive(held, [_KERNELS])
            for number in chosen:
                half = kernels[: len(kernels) // 2] if number == 1 else kernels[len(kernels) // 2 :]
                (into / f"kernels.{number}.part").write_bytes(half)


def _archive(wheel: zipfile.ZipFile, names: Iterable[str], more: dict[str, bytes] | None = None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in (*((name, wheel.read(name)) for name in names), *(more or {}).items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return lzma.compress(packed.getvalue(), preset=6)


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


def _needs(into: Path) -> list[str]:
    """What the wheels need that is not among them in a version that suits."""
    parts = (file.name.split("-") for file in into.glob("*.whl"))
    held = {canonicalize_name(name): version for name, version, *_ in parts}
    needs: set[str] = set()
    for file in into.glob("*.whl"):
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
    parser.add_argument("--parts", default="wheels,vllm", help=f"of {', '.join(_PARTS)}")
    parser.add_argument("--wheel", type=Path, help="vLLM's wheel for CUDA, where it has been downloaded before")
    arguments = parser.parse_args(argv)
    arguments.parts = arguments.parts.split(",")
    if unknown := set(arguments.parts) - set(_PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
