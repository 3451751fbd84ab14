"""What every rank of a job of functions runs: `python -m hpc_train.launch.functions.worker FOLDER`.

It keeps submitit's protocol (its environment, its pickles, its `checkpoint`), and mends what that loses: a signal
before the handlers are there, SIGTERM, the exit code of a failure, and a short job that is taken for one out of time.
"""

from __future__ import annotations

from hpc_train.runtime import stop

_early = stop.install() if __name__ == "__main__" else stop.StopRequest()  # before anything slow is imported

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from hpc_train.errors import EXIT_REQUEUE, UserError  # noqa: E402

FAILED = 1


def main(folder: str) -> int:
    """Run the call that lies in `folder` for this process; returns the exit code. Result or error go into a file."""
    import submitit
    from submitit.core.utils import UncompletedJobError

    from hpc_train.launch.functions import call
    from hpc_train.launch.functions.files import load, save, wait_for
    from hpc_train.launch.functions.stopping import Stopper, leave_marker

    os.environ["SUBMITIT_FOLDER"] = folder
    env = submitit.JobEnvironment()
    paths, rank = env.paths, env.global_rank
    if env.cluster == "local":
        _end_with_parent()
    try:
        delayed = load(wait_for(lambda: call.submitted(paths)))
        stopper = Stopper(env, delayed)
        stopper.install(_early)
        result = delayed.result()
        stopper.too_late()
        failed = call.fails(delayed.function, result)
        if failed or call.is_kept(delayed.function, rank, result):
            save(("success", result), paths.result_pickle)
        return FAILED if failed else 0
    except SystemExit as left:
        if left.code == EXIT_REQUEUE:
            leave_marker(env)  # of a function that has saved and stopped by itself
            return EXIT_REQUEUE
        return _failed(paths.result_pickle)
    except UncompletedJobError as error:
        print(f"hpc_train: {error}", flush=True)
        return _failed(paths.result_pickle)
    except UserError as error:
        print(f"hpc_train: {error}", flush=True)
        save(("error", str(error)), paths.result_pickle)
        return FAILED
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        return _failed(paths.result_pickle)


def _failed(result: Path) -> int:
    from hpc_train.launch.functions.files import save

    save(("error", traceback.format_exc()), result)
    return FAILED


def _end_with_parent() -> None:
    """No rank of the local pool outlives it (prctl(2), PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)


def leave(code: int) -> Any:
    """Exit as the function's own libraries are used to, unless the process is told to end at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
