"""What a machine multiplies fastest, by what its processor says of itself."""

from pathlib import Path

import pytest

from dataflow.planning import this_machine
from dataflow.planning.hosts import Devices


@pytest.mark.parametrize(
    ("vendor", "flags", "gpus", "dtype"),
    [
        ("AuthenticAMD", "flags\t\t: fpu avx512f avx512_bf16", 0, "bfloat16"),
        ("GenuineIntel", "flags\t\t: fpu avx512f avx512_bf16", 0, "float32"),
        ("GenuineIntel", "flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile", 0, "bfloat16"),
        ("AuthenticAMD", "flags\t\t: fpu avx2 avx512f", 0, "float32"),
        ("AuthenticAMD", "vmx flags\t: avx512_bf16", 0, "float32"),
        ("GenuineIntel", "flags\t\t: fpu avx2", 1, "bfloat16"),
        ("GenuineIntel", None, 0, "float32"),
    ],
)
def test_weights_are_bfloat16_where_the_processor_multiplies_it_faster(
    vendor: str,
    flags: str | None,
    gpus: int,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n{flags}\n")
    monkeypatch.setattr(this_machine, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(this_machine, "this_machine", lambda: Devices(cpus=1, gpus=gpus))
    assert this_machine.quick_dtype() == dtype
