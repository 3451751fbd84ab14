"""Which combinations exist, asked before any rank is started. No torch in this package."""

from hpc_train.parallel.support.check import check_support

__all__ = ["check_support"]
