"""Owns small wheels for tests: any files, with a valid RECORD."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def record_hash(content: bytes) -> str:
    """The hash of a file as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def build_wheel(
    directory: Path,
    name: str,
    version: str,
    files: dict[str, bytes],
    requires: tuple[str, ...] = (),
    extras: tuple[str, ...] = (),
) -> Path:
    """A wheel with these files."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires) + f"\nVersion: {version}\n"
    tags = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {**files, f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": tags}
    rows = [f"{path},{record_hash(content)},{len(content)}" for path, content in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in members.items():
            entry = zipfile.ZipInfo(member, (2026, 1, 2, 3, 4, 6))
            entry.external_attr = (0o100755 if member.endswith(".so") else 0o100644) << 16
            wheel.writestr(entry, content)
    return path


def kernel_wheel(directory: Path, version: str = "0.4.5", folders: tuple[str, ...] = ("sm90", "sm100")) -> Path:
    """A wheel laid out as sglang-kernel's."""
    files = {f"sgl_kernel/{folder}/common_ops.abi3.so": folder.encode() * 40 for folder in folders}
    files |= {
        "sgl_kernel/__init__.py": b"",
        "sgl_kernel/flash_attn.py": b"from sgl_kernel import flash_ops\n",
        "sgl_kernel/flash_ops.abi3.so": b"f" * 3_000_000,
        "sgl_kernel/flashmla_ops.abi3.so": b"m" * 50,
        "sgl_kernel/infllm_ops.cpython-310-x86_64-linux-gnu.so": b"i" * 50,
        "triton_kernels/sm100/tables.py": b"",
    }
    return build_wheel(directory, "sglang-kernel", version, files)
