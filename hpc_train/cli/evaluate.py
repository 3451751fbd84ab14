"""`hpc-train eval`: measure a checkpoint on data, or on the tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hpc_train.cli.arguments import add_examples, add_json, add_weights, choose_device, whole_number

if TYPE_CHECKING:
    from hpc_train.inference.evaluate import CheckpointScore


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval`."""
    command.add_argument("where", metavar="RUN", help="run directory, step-<n>, or a folder of transformers")
    measure = command.add_mutually_exclusive_group()
    measure.add_argument(
        "--data", metavar="PATH", help="store, text, conversations or images (default: the run's own data)"
    )
    measure.add_argument("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, separated by commas")
    command.add_argument(
        "--split",
        choices=("validation", "train", "all"),
        help="part of the data (default: all of --data, else validation)",
    )
    command.add_argument(
        "--batches",
        metavar="N",
        type=whole_number(1),
        help="only the first N global batches of the run's evaluations, in their order (default: every sample once)",
    )
    command.add_argument("--batch", metavar="N", type=whole_number(1), help="samples in a batch (default: the run's)")
    command.add_argument(
        "--sequence-length", metavar="N", type=whole_number(1), help="tokens in a sequence (default: the run's)"
    )
    command.add_argument("--chat", action="store_true", help="PATH has conversations; only the assistant's turns count")
    command.add_argument(
        "--column",
        metavar="NAME",
        help="column of the text or the messages in records, or of the label in tars (default: the run's)",
    )
    command.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer of text (default: the model's)")
    command.add_argument(
        "--precision", choices=("fp64", "fp32", "bf16", "fp16"), help="number format (default: the run's)"
    )
    add_weights(command)
    command.add_argument("--base", metavar="FOLDER", help="where the run's model.path is now, if it was moved")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="device to compute on (default: cuda if there is one)"
    )
    command.add_argument("--include-path", metavar="DIR", help="folder with task files of your own")
    command.add_argument("--limit", metavar="N", type=whole_number(1), help="examples of each task (default: all)")
    command.add_argument(
        "--shots", metavar="N", type=whole_number(0), help="solved examples in a prompt (default: the task's)"
    )
    add_json(command)
    add_examples(
        command,
        "hpc-train eval runs/first",
        "hpc-train eval runs/tuned --data test.h5 --json",
        "hpc-train eval runs/tuned --tasks my_task --include-path tasks",
    )
    command.set_defaults(run=_evaluate)


_DATA_OPTIONS = ("split", "batches", "sequence_length", "chat", "column", "precision")
"""Options that only measuring on data reads."""
_TASK_OPTIONS = ("include_path", "limit", "shots")
"""Options that only --tasks reads."""


def _evaluate(args: argparse.Namespace) -> int:
    _refuse_without_effect(args)
    if args.tasks is not None:
        return _evaluate_tasks(args)
    from hpc_train.inference.evaluate import EvaluationRequest, evaluate_checkpoint

    request = EvaluationRequest(
        where=args.where,
        data=args.data,
        split=args.split,
        batches=args.batches,
        micro_batch=args.batch,
        sequence_length=args.sequence_length,
        tokenizer=args.tokenizer,
        chat=args.chat,
        column=args.column,
        precision=args.precision,
        base=args.base,
        weights=args.weights,
    )
    score = evaluate_checkpoint(request, choose_device(args.device))
    if args.json:
        _print_score_json(score)
    else:
        _print_score(args.where, score)
    return 0


def _print_score_json(score: CheckpointScore) -> None:
    from hpc_train.cli.output import print_json

    print_json(
        {
            "step": score.step,
            "weights": "average" if score.averaged else "trained",
            "data": score.data,
            "split": score.split,
            score.unit: score.samples,
            "targets": score.result.targets,
            "loss": score.result.loss,
            **score.result.metrics,
        }
    )


def _print_score(where: str, score: CheckpointScore) -> None:
    checkpoint = where if score.step is None else f"{where}, step {score.step}"
    checkpoint += ", average of the weights" if score.averaged else ""
    counts = f"{score.samples:,} {score.unit}, {score.result.targets:,} targets"
    print(f"{checkpoint}; {score.data} ({score.split}): {counts}")
    values = {"loss": score.result.loss, **score.result.metrics}
    width = max(12, *map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}} {value:.6g}")


def _refuse_without_effect(args: argparse.Namespace) -> None:
    """Raise UserError for an option that only the other way of measuring reads."""
    from hpc_train.errors import UserError

    unread = _TASK_OPTIONS if args.tasks is None else _DATA_OPTIONS
    for name in unread:
        if getattr(args, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            needs = "needs --tasks" if args.tasks is None else "has no effect with --tasks"
            raise UserError(f"{option}: {needs}; leave it out")
    if args.data is not None:
        return
    for name in ("chat", "column") if args.tasks else ("chat", "column", "tokenizer"):
        if getattr(args, name):
            raise UserError(f"--{name}: says how --data is read, which is not given; leave it out, or give --data")


def _evaluate_tasks(args: argparse.Namespace) -> int:
    from hpc_train.cli.output import print_json, print_table
    from hpc_train.inference.load_model import load_model
    from hpc_train.inference.task_harness import TaskOptions, evaluate_tasks, import_harness

    import_harness()
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    options = TaskOptions(tuple(names), args.include_path, args.limit, args.shots, args.batch or 8)
    scores = evaluate_tasks(
        load_model(args.where, args.tokenizer, choose_device(args.device), args.base, args.weights), options
    )
    if args.json:
        print_json({"tasks": scores})
        return 0
    rows = [(task, metric, f"{value:.6g}") for task, metrics in scores.items() for metric, value in metrics.items()]
    print_table(("task", "metric", "value"), rows, numbers=("value",))
    return 0
