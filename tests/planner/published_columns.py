"""Fill the columns of the research table of published runs, which has some facts only in its notes.

`python tests/planner/published_columns.py IN.csv OUT.csv` writes a table that `hpc-train plan validate` and `plan fit`
read: the software of each row, and what its notes say of compilation, attention, schedules, memory and formats. Rows of
torchtitan with products in 8 bits are left out, because published_float8.csv has them with their recipes.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

_SOFTWARE = (
    (r"megatron-deepspeed|deepspeed|bigscience", "megatron-deepspeed"),
    (r"llm-foundry", "llm-foundry"),
    (r"torchtitan", "torchtitan"),
    (r"fms-fsdp|fsdp", "fsdp"),
    (r"megatron-bridge", "megatron-bridge"),
    (r"nemo|megatron-core|mcore", "megatron-core"),
    (r"megascale: |megascale-\d+b", "megascale"),
    (r"arxiv:2402\.15627", "megatron of MegaScale's paper"),
    (r"megatron|arxiv:2104\.04473|arxiv:2205\.05198|arxiv:2401\.10241", "megatron of 2021"),
)
_QUOTATION = re.compile(r"\balso in [^|)]*")
"""Matches mentions of other publications that quote the run."""
_SCHEDULES = {"zb1p": "interleaved_zero_bubble", "zb2p": "zb_2p", "zbv": "zbv", "gpipe": "gpipe"}
ADDED = (
    *("software", "compile", "async_tp", "attention", "schedule", "reshard", "launch_blocking", "gradient_bytes"),
    *("memory_of", "memory_stage", "out_of_memory", "fp8_gather", "composite_norms"),
)


def fill_row(row: dict[str, str]) -> dict[str, str] | None:
    """Return the row with the columns of ADDED, or None for one that another table has."""
    notes = row["notes"] or ""
    text = _QUOTATION.sub("", f"{row['source']} | {row['id']} | {notes}".lower())
    name = next((name for pattern, name in _SOFTWARE if re.search(pattern, text)), "")
    found = {**row, **dict.fromkeys(ADDED, "")}
    if name == "torchtitan" and ("fp8" in row["precision"] or "float8" in text):
        return None
    if " of " in name:  # Megatron-LM before FlashAttention; MegaScale's baseline had it
        found |= {"software": "megatron-lm", "year": "2021", "attention": "flash" if "MegaScale" in name else "eager"}
        found["gradient_bytes"] = "4" if "MegaScale" in name else ""
    else:
        found["software"] = name
    if name == "megatron-deepspeed":
        # What its users run unless they say otherwise.
        found["sharding"] = "zero1" if "ZeRO stage not stated" in notes else row["sharding"]
        found["attention"] = "flash" if "flash" in text else "eager"
    compiled = "compile" in text or "asynctp_llama3_h100" in text  # the commands of that page compile
    found["compile"] = "1" if compiled else "0" if name in ("torchtitan", "fsdp", "llm-foundry") else ""
    # torchtitan's own RMSNorm of 2024 (torchtitan/models/norms.py)
    found["composite_norms"] = "1" if name == "torchtitan" and "202412" in text else ""
    found["async_tp"] = "1" if re.search(r"async-?tp", text) and not re.search(r"vanilla-?tp", text) else ""
    if "triton" in text:
        found["attention"] = "triton"
    found["schedule"] = _schedule(row, notes)
    found["reshard"] = "0" if "SHARD_GRAD_OP" in notes else ""
    found["launch_blocking"] = "1" if "LAUNCH_BLOCKING" in notes else ""
    if name == "megatron-bridge":  # its recipes of benchmarks (perf_recipes/_common.py, grad_reduce_in_fp32)
        found["gradient_bytes"], found["fp8_gather"] = "2", "1" if "fp8" in row["precision"] else ""
    if "fp32 grad" in notes.lower():
        found["gradient_bytes"] = "4"
    found["memory_of"] = "device" if "nvidia-smi" in notes or name == "megatron-deepspeed" else ""
    found["memory_stage"] = "first" if "embedding-stage" in notes or "bigscience" in row["source"] else ""
    found["out_of_memory"] = "1" if re.search(r"\bOOM\b", notes) and not row["iter_time_s"] else ""
    return found


def _schedule(row: dict[str, str], notes: str) -> str:
    named = re.search(r"schedule=?\s*([A-Za-z0-9-]+)", notes)
    return _SCHEDULES.get(named[1].lower().replace("-", ""), "") if named else ""


def fill_columns(source: Path, target: Path) -> None:
    """Write the filled table."""
    with source.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = [filled for row in rows if (filled := fill_row(row))]
    names = [*rows[0], *(name for name in ADDED if name not in rows[0])]
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    fill_columns(Path(sys.argv[1]), Path(sys.argv[2]))
