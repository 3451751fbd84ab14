"""The entry point of every rank of a job of callables: `python -m hpc_train.launch.callables.worker FOLDER`.

It keeps submitit's protocol (its environment, its pickles, its `checkpoint`), and handles what submitit's own entry
point loses: a signal before the handlers are installed, SIGTERM, the exit code of a failure, and a short job that is
mistaken for one out of time.
"""

from __future__ import annotations

from hpc_train.runtime import stop_request

_early_stop = (
    stop_request.install_stop_handlers() if __name__ == "__main__" else stop_request.StopRequest()
)  # before anything slow is imported

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402

from hpc_train.errors import EXIT_FAILED, EXIT_REQUEUE, UserError  # noqa: E402
from hpc_train.processes import signal_at_parent_end  # noqa: E402


def main(folder: str) -> int:
    """Run the call that lies in `folder` for this process; returns the exit code. Result or error go into a file."""
    import submitit
    from submitit.core.utils import UncompletedJobError

    from hpc_train.launch.callables import calls
    from hpc_train.launch.callables.calls import load_pickle, save_pickle, wait_for_file
    from hpc_train.launch.callables.stop_signals import StopSignalHandler, write_requeue_marker

    os.environ["SUBMITIT_FOLDER"] = folder
    env = submitit.JobEnvironment()
    paths, rank = env.paths, env.global_rank
    if env.cluster == "local":
        signal_at_parent_end(signal.SIGTERM)
    try:
        delayed = load_pickle(wait_for_file(lambda: calls.find_submitted_pickle(paths)))
        stopper = StopSignalHandler(env, delayed)
        stopper.install(_early_stop)
        result = delayed.result()
        stopper.ignore_signals()
        failed = calls.is_failure(delayed.function, result)
        if failed or calls.keeps_result(delayed.function, rank, result):
            save_pickle(("success", result), paths.result_pickle)
        return EXIT_FAILED if failed else 0
    except SystemExit as exit_request:
        if exit_request.code == EXIT_REQUEUE:
            write_requeue_marker(env)  # of a function that has saved and stopped by itself
            return EXIT_REQUEUE
        return _save_failure(paths.result_pickle)
    except UncompletedJobError as error:
        print(f"hpc_train: {error}", flush=True)
        return _save_failure(paths.result_pickle)
    except UserError as error:
        print(f"hpc_train: {error}", flush=True)
        save_pickle(("error", str(error)), paths.result_pickle)
        return EXIT_FAILED
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        return _save_failure(paths.result_pickle)


def _save_failure(result: Path) -> int:
    from hpc_train.launch.callables.calls import save_pickle

    save_pickle(("error", traceback.format_exc()), result)
    return EXIT_FAILED


if __name__ == "__main__":
    # Unlike rank_entrypoint, with the exit handlers that the function's own libraries have installed.
    sys.exit(main(sys.argv[1]))
