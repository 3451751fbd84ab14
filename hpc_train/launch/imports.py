"""What a rank trains with, imported faster."""

from __future__ import annotations

import gc


def import_training() -> None:
    """Import torch and all that training needs, with no garbage collection meanwhile or ever again of what they made.

    Collections would go through all modules made so far again and again, which is a quarter of a rank's start; later
    ones, in the middle of a step, would take as long as all modules are many.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        import torch._dynamo  # noqa: F401  the first optimizer asks for it

        import hpc_train.training.rank  # noqa: F401
    finally:
        gc.freeze()
        if was:
            gc.enable()
