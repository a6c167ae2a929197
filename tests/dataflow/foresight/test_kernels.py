"""Measured kernels of an optional package: between the shapes, beyond them, and what a step is made
of.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from made_tables import (
    ATTENTION_S,
    EXCHANGE_S,
    EXPERTS_S,
    GEMM_S,
    PROMPTS_S,
    product,
    put,
    write,
    write_flat,
)

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import device_kind
from dataflow.foresight.kernel_tables import Tables, folder
from dataflow.foresight.steps import SMALL_KERNEL_S, SMALL_KERNELS, Kernels
from transport.weights.costs.decoder import Decoder, Experts, Latent

H100 = device_kind("H100")


DENSE = Decoder(
    layers=3, width=1024, inner=4096, heads=16, kv_heads=4, vocabulary=5000, head_width=128
)


MIXED = replace(
    DENSE, width=2048, experts=Experts(number=128, per_token=8, inner=768, shared=1, dense_layers=1)
)


WHOLE = [(n, k, m) for n in (1, 10**6) for k in (1, 10**6) for m in (1, 10**6)]


SMALL_S = SMALL_KERNELS * SMALL_KERNEL_S


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return put(tmp_path, monkeypatch)


def products(package: Path, version: str = "0.24.0", times: float = 1.0) -> None:
    """That take as long as they compute: a power of each axis, but for one shape that nobody
    measured.
    """
    shapes = [(n, k, m) for n in (64, 256, 1024) for k in (64, 1024) for m in (1, 16, 256)]
    rows = [
        product(n, k, m, times * 1e-9 * n * k * m)
        for n, k, m in shapes
        if (n, k, m) != (1024, 64, 256)
    ]
    # another kernel, and slower
    write(package, "gemm_perf", [*rows, product(64, 64, 16, 1.0)], version=version)


def gemm(**where: object) -> Tables:
    return Tables(kind="H100", **where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "k", "m"), [(64, 64, 16), (100, 64, 16), (64, 500, 3), (700, 300, 10)]
)
def test_between_measured_shapes_a_power_law_is_found_again_and_the_fastest_kernel_counts(
    package: Path, n: float, k: float, m: float
) -> None:
    products(package)
    tables = gemm()
    found = (
        tables.table("gemm_perf", ("n", "k", "m"), gemm_dtype="bfloat16").cut(n=n, k=k).seconds(m)
    )
    assert found == pytest.approx(1e-9 * n * k * m) and not tables.beyond


def test_beyond_what_was_measured_seconds_grow_with_the_shape_and_it_is_said_to_be_extrapolated(
    package: Path,
) -> None:
    products(package)
    tables = gemm()
    table = tables.table("gemm_perf", ("n", "k", "m"), gemm_dtype="bfloat16")
    assert table.cut(n=2048, k=1024).seconds(16) == pytest.approx(1e-9 * 2048 * 1024 * 16)
    assert tables.beyond == {("gemm", "n"): "gemm at n 2,048, measured to 1,024"}
    assert table.cut(n=64, k=1024).seconds(512) == pytest.approx(1e-9 * 64 * 1024 * 512)
    # below: as long as the smallest
    assert table.cut(n=64, k=32).seconds(1) == pytest.approx(1e-9 * 64 * 64)
    assert set(tables.beyond) == {("gemm", "n"), ("gemm", "m"), ("gemm", "k")}


def test_where_a_corner_was_not_measured_it_is_extrapolated_from_what_both_sides_have(
    package: Path,
) -> None:
    products(package)
    tables = gemm()
    found = (
        tables.table("gemm_perf", ("n", "k", "m"), gemm_dtype="bfloat16")
        .cut(n=700, k=300)
        .seconds(200)
    )
    assert found == pytest.approx(1e-9 * 700 * 300 * 200)
    assert tables.beyond == {("gemm", "m"): "gemm at m 200, measured to 16"}


def test_the_newest_version_is_read_unless_another_is_named(package: Path) -> None:
    products(package, "0.24.0", times=2.0)
    products(package, "0.9.1")
    found = [
        tables.table("gemm_perf", ("n", "k", "m"), gemm_dtype="bfloat16").cut(n=64, k=64).seconds(1)
        for tables in (gemm(), gemm(server="0.9.1"))
    ]
    assert found[0] == pytest.approx(2 * found[1])
    with pytest.raises(GraphError, match="of vLLM 0.10.0; found 0.9.1, 0.24.0; foresee with one"):
        gemm(server="0.10.0").table("gemm_perf", ("n", "k", "m"))


def test_a_step_is_its_kernels_one_after_the_other(package: Path) -> None:
    write_flat(package)
    alone, shared = Kernels(decoder=DENSE, kind=H100), Kernels(decoder=DENSE, kind=H100, ranks=2)
    layer = ATTENTION_S + 4 * GEMM_S + SMALL_S
    assert alone.decode(7, 300) == pytest.approx(3 * layer + GEMM_S)
    assert shared.decode(7, 300) == pytest.approx(3 * (layer + 2 * EXCHANGE_S) + GEMM_S)
    # 8 prompts of 1,000 tokens are taken in at once
    assert alone.prompt(1000) == pytest.approx(
        (3 * (PROMPTS_S + 4 * GEMM_S + SMALL_S) + GEMM_S) / 8
    )
    assert "0.24.0" in alone.source and "extrapolated" not in alone.source
    alone.decode(2e6, 300)
    assert (
        "extrapolated: generation_attention at batch_size 2,000,000, measured to 1,000,000"
        in alone.source
    )


def test_layers_with_experts_have_a_router_their_experts_and_shared_ones(package: Path) -> None:
    write_flat(package)
    every = ATTENTION_S + 2 * GEMM_S + SMALL_S
    expected = 3 * every + 1 * 2 * GEMM_S + 2 * (GEMM_S + EXPERTS_S + 2 * GEMM_S) + GEMM_S
    assert Kernels(decoder=MIXED, kind=H100).decode(7, 300) == pytest.approx(expected)


def test_latent_attention_is_measured_with_its_projections(package: Path) -> None:
    write_flat(package)
    latent = Latent(queries=1536, keys=512, plain=128, rotated=64, values=128)
    model = Kernels(
        decoder=replace(DENSE, width=7168, heads=128, latent=latent),
        kind=H100,
        products="fp8",
        ranks=2,
    )
    write(
        package,
        "gemm_perf",
        [product(n, k, m, GEMM_S, d) for n, k, m in WHOLE for d in ("fp8", "bfloat16")],
    )
    for name, length in (
        ("mla_generation_module_perf", "step"),
        ("mla_context_module_perf", "isl"),
    ):
        write(
            package,
            name,
            [
                {
                    "gemm_type": "fp8_block",
                    "kv_cache_dtype": "bfloat16",
                    "num_heads": heads,
                    "batch_size": batch,
                    length: tokens,
                    "latency": 0.1 * heads,
                }
                for heads in (8, 128)
                for batch in (1, 100)
                for tokens in (1, 10000)
            ],
        )
    layer = 64 * 1e-4 + 2 * GEMM_S + SMALL_S + 2 * EXCHANGE_S
    assert model.decode(7, 300) == pytest.approx(3 * layer + GEMM_S)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"kind": device_kind("MI300X")},
            "MI300X has no measured kernels in aiconfigurator-core; found A100, H100",
        ),
        (
            {"kind": device_kind("B200")},
            "B200 has no measured generation_attention_perf of vLLM; found none",
        ),
        (
            {"products": "fp8"},
            "H100 has no measured gemm_perf with gemm_dtype=fp8; found gemm_dtype=.'bfloat16'",
        ),
        ({"ranks": 16}, "16 ranks of tensor parallelism span nodes of 8 H100"),
        ({"decoder": replace(DENSE, head_width=80)}, "head_dim=80.*found head_dim=.128"),
        (
            {"decoder": replace(MIXED, experts=Experts(number=64, per_token=8, inner=768))},
            "num_experts=64.*found",
        ),
        ({"decoder": MIXED, "ranks": 4}, "not measured over 4 ranks, but over 1, 2"),
        (
            {
                "decoder": replace(
                    DENSE, latent=Latent(queries=0, keys=512, plain=128, rotated=64, values=128)
                )
            },
            "latent attention was measured with DeepSeek-V3's dimensions alone",
        ),
    ],
)
def test_what_was_not_measured_is_refused_with_what_there_is(
    package: Path, change: dict, text: str
) -> None:  # type: ignore[type-arg]
    write_flat(package)
    with pytest.raises(GraphError, match=text):
        Kernels(**({"decoder": DENSE, "kind": H100} | change)).decode(4, 100)


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.foresight.kernel_tables._MODULE", "no_such_package_of_tables")
    with pytest.raises(
        GraphError,
        match=r"aiconfigurator-core, which is not installed here; pip install 'dataflow-rl",
    ):
        folder()


def test_installed_times_of_a_dense_model_order_the_devices_by_their_bandwidth() -> None:
    try:
        folder()
    except GraphError:
        pytest.skip("aiconfigurator-core is not installed (pip install 'dataflow-rl[foresight]')")
    llama = Decoder.of("llama-8b")
    seconds = [
        Kernels(decoder=llama, kind=device_kind(each)).decode(16, 1024)
        for each in ("A100", "H100", "H200")
    ]
    assert seconds == sorted(seconds, reverse=True)
    bound = 16e9 / H100.memory_bytes_per_s  # weights are read once
    assert bound < seconds[1] < 2 * bound
