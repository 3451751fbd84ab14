"""What `bench gemm` has measured, and its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.errors import UserError

VERSION = 1


@dataclass(frozen=True)
class Product:
    """[m, k] x [k, n] in one format."""

    precision: str
    m: int
    n: int
    k: int
    seconds: float
    """Median over rounds."""

    @property
    def tflops(self) -> float:
        return 2e-12 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Result:
    """Of one device."""

    device: str
    """As torch calls it; cpu."""
    date: str
    """ISO 8601, UTC."""
    threads: int
    """Of a CPU."""
    copy_gb_s: float
    """10^9 bytes/s that a copy within the device's memory reads and writes together."""
    products: tuple[Product, ...]

    def best(self) -> dict[str, Product]:
        """Precision -> its quickest product, by FLOP/s."""
        names = dict.fromkeys(it.precision for it in self.products)
        return {name: max((it for it in self.products if it.precision == name), key=_speed) for name in names}

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)


def _speed(product: Product) -> float:
    return product.tflops


def read_result(path: Path) -> Result:
    """Raises UserError, one line, for a file that `bench gemm --out` has not written."""
    try:
        content = json.loads(path.read_text())
        if content.pop("version") != VERSION:
            raise UserError(f"{path}: written by another version; run `hpc-train bench gemm` again")
        products = tuple(Product(**it) for it in content.pop("products"))
        found = Result(**content, products=products)
        if not products or not all(it.seconds > 0 for it in products) or not found.copy_gb_s > 0:
            raise ValueError
        return found
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not products as `hpc-train bench gemm --out` writes them") from None


def shapes(smallest: int, largest: int) -> Sequence[tuple[int, int, int]]:
    """(m, n, k): cubes of rising powers of two, and the products of a transformer layer of that width: 2,048 tokens
    times its attention's output and both of its feed-forward matrices, four times as wide."""
    found = []
    size = smallest
    while size <= largest:
        found.append((size, size, size))
        found += [(2048, size, size), (2048, 4 * size, size), (2048, size, 4 * size)]
        size *= 2
    return list(dict.fromkeys(found))
