"""The result of `bench gpu`, and its table in Markdown with published figures to compare with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One measured figure."""

    what: str
    value: float | None
    """None: cannot be known here, for the reason in `note`."""
    unit: str
    note: str = ""


@dataclass(frozen=True)
class PartResult:
    """The figures of one part, or why there are none."""

    part: str
    seconds: float
    rows: tuple[Row, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class GpuResult:
    """All parts that have been run."""

    device: str
    software: str
    date: str
    """ISO 8601, UTC."""
    quick: bool
    parts: tuple[PartResult, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


@dataclass(frozen=True)
class PublishedSpeed:
    """A published speed of Llama 3.1 8B, sequences of 8,192 tokens."""

    what: str
    tokens_per_second: float
    """Tokens a second of one GPU."""
    source: str


_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks"
PUBLISHED = (
    PublishedSpeed("torchtitan, 8 H100 (500 W), bf16", 5762, f"{_TITAN}/llama3_h100_202412_torchtitan.md"),
    PublishedSpeed("torchtitan, 8 H100 (500 W), bf16, compiled", 6667, f"{_TITAN}/llama3_h100_202412_torchtitan.md"),
    PublishedSpeed("torchtitan, 8 H100 (500 W), fp8, compiled", 8532, f"{_TITAN}/llama3_h100_202412_torchtitan.md"),
    PublishedSpeed("torchtitan, 32 H200, fp8, compiled", 10938, f"{_TITAN}/llama3-8b_h200_202506_trainy-whitefiber.md"),
)


def compute_published_mfu(published: PublishedSpeed) -> float:
    """Return the MFU of a published run, by this project's FLOPs and against the peak of bf16, also for fp8.

    An H100 and an H200 have the same peak.
    """
    from hpc_train.config.compose import compose
    from hpc_train.models.counts import compute_flops_per_token

    config = compose(["model=llama_8b", "cluster=dgx_h100"])
    flops = compute_flops_per_token(config.model, 8192)
    assert flops is not None
    return published.tokens_per_second * flops / (config.cluster.gpu.peak_tflops["bf16"] * 1e12)


def format_markdown(result: GpuResult) -> str:
    """Format a result as a page."""
    return "\n".join(_list_lines(result))


def _list_lines(result: GpuResult) -> Iterator[str]:
    yield f"# {result.device}"
    yield ""
    yield f"`hpc-train bench gpu`, {result.date}, {result.software}."
    if result.quick:
        yield "Tiny shapes (`--quick`): the parts run, but these figures say nothing about speed."
    yield ""
    yield "| part | figure | value | |"
    yield "| --- | --- | --- | --- |"
    for part in result.parts:
        for row in part.rows:
            yield f"| {part.part} | {row.what} | {_format_value(row)} | {_escape(row.note)} |"
        if part.failed is not None:
            yield f"| {part.part} | **failed** | | {_escape(part.failed)} |"
    yield ""
    yield "Published, Llama 3.1 8B with sequences of 8,192 tokens, one GPU of many. MFU is by the same FLOPs as above"
    yield "(causal attention counts half) and against the peak of bf16:"
    yield ""
    yield "| run | tokens/s | MFU |"
    yield "| --- | --- | --- |"
    for run in PUBLISHED:
        yield f"| [{run.what}]({run.source}) | {run.tokens_per_second:,.0f} | {compute_published_mfu(run):.1%} |"


def _format_value(row: Row) -> str:
    if row.value is None:
        return "not known"
    if row.unit == "share":
        return f"{row.value:.1%}"
    is_integer = abs(row.value) >= 1000 or float(row.value).is_integer()
    number = f"{row.value:,.0f}" if is_integer else f"{row.value:.3g}"
    return f"{number} {row.unit}".strip()


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
