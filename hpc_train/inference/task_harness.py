"""Measure a model on the tasks of lm-evaluation-harness (the package lm_eval), which is optional.

The harness has its own class for models of transformers, but that wants a tokenizer of transformers; this one takes any
tokenizer of a run. Requests are scored as there: log likelihoods of continuations, long texts in windows, and new text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError
from hpc_train.inference.generate import GenerateOptions, generate_texts
from hpc_train.inference.load_model import LoadedModel
from hpc_train.near_names import suggest_names

_MAX_NEW_TOKENS = 256
"""Length of an answer that its task does not limit, as in the harness."""
_DEFAULT_LENGTH = 2048
"""Tokens of a window for a model that does not say how many positions it has."""


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks, and how."""

    tasks: tuple[str, ...]
    include_path: str | None = None
    """Folder with task files in addition to those of the harness."""
    limit: int | None = None
    """Examples of each task; None: all."""
    shots: int | None = None
    """Solved examples in a prompt; None: what the task says."""
    batch: int = 8
    """Sequences at once."""


def import_harness() -> Any:
    """Import the package lm_eval. Raises UserError if it is not installed."""
    try:
        import lm_eval
    except ImportError:
        raise UserError(
            "--tasks needs the package lm_eval (lm-evaluation-harness): pip install 'hpc_train[lm-eval]'; --data "
            "measures loss and accuracy without it"
        ) from None
    return lm_eval


def evaluate_tasks(loaded: LoadedModel, options: TaskOptions) -> dict[str, dict[str, float]]:
    """Return the metrics of each task by name, as the harness computes them.

    Raises UserError for tasks that it does not know, and for data of a task that cannot be read.
    """
    if loaded.has_encoder:
        raise UserError("--tasks: scores decoders only, and this model has an encoder; use `lm_eval --model hf` itself")
    harness = import_harness()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _find_tasks(options, harness.__version__)
    model = _make_harness_model(loaded, options.batch)
    try:
        results = harness.simple_evaluate(
            model=model,
            tasks=list(options.tasks),
            num_fewshot=options.shots,
            limit=options.limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    except UserError:  # raised by our own model, which the harness calls
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # data of a task: not there, or of another form
        text = " ".join(str(error).split())[:200]
        raise UserError(f"--tasks {','.join(options.tasks)}: {type(error).__name__}: {text}") from error
    return {task: _select_numbers(measured) for task, measured in results["results"].items()}


def _find_tasks(options: TaskOptions, version: str) -> Any:
    """Return the harness's TaskManager that knows all tasks. Raises UserError for one that is in no file."""
    from lm_eval.tasks import TaskManager

    folder = options.include_path
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--include-path {folder}: no such folder; give one with task files (*.yaml)")
    # First the user's files alone: the harness has thousands, which take a minute to read.
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    if any(task not in manager.all_tasks for task in options.tasks):
        manager = TaskManager(include_path=folder)
    if unknown := [task for task in options.tasks if task not in manager.all_tasks]:
        hint = suggest_names(unknown[0], manager.all_tasks, "`lm-eval ls tasks` lists them")
        raise UserError(
            f"--tasks: {unknown[0]} is not a task, group or tag of lm_eval {version}; {hint}"
            f"{' Or' if hint.endswith('?') else ', and'} --include-path DIR adds your own"
        )
    return manager


def _select_numbers(measured: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of one task; the harness names them metric,filter."""
    numbers = {}
    for key, value in measured.items():
        name, _, used_filter = key.partition(",")
        if used_filter and not name.endswith("_stderr") and isinstance(value, int | float):
            numbers[name if used_filter == "none" else f"{name} ({used_filter})"] = float(value)
    return numbers


class TokenScorer:
    """Scores tokens with a model: the part of the work that is not the harness's."""

    def __init__(self, loaded: LoadedModel, batch: int) -> None:
        self._model, self._batch = loaded.model, batch
        self.length = int(getattr(loaded.model.config, "max_position_embeddings", None) or _DEFAULT_LENGTH)
        """Tokens that the model reads at once."""

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        """Yield, for each (context, continuation), the log likelihood of the continuation and whether it is greedy.

        The start of what is longer than the model can read is left out.
        """
        for first in range(0, len(pairs), self._batch):
            yield from self._score_batch(pairs[first : first + self._batch])

    @torch.no_grad()
    def _score_batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        rows = [(context + continuation)[-(self.length + 1) :] for context, continuation in pairs]
        width = max(map(len, rows)) - 1
        inputs = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(inputs)
        for index, row in enumerate(rows):  # padded on the right: a causal model does not see it
            inputs[index, : len(row) - 1] = torch.tensor(row[:-1])
            mask[index, : len(row) - 1] = 1
        device = self._model.device
        logits: Tensor = self._model(
            input_ids=inputs.to(device), attention_mask=mask.to(device), use_cache=False
        ).logits
        for index, (row, (_, continuation)) in enumerate(zip(rows, pairs, strict=True)):
            targets = torch.tensor(row[-len(continuation) :], device=device)
            # The logits at a position are about the next token: those of the continuation begin one before it.
            predicted = logits[index, len(row) - 1 - len(targets) : len(row) - 1]
            wide = predicted.float() if predicted.dtype != torch.float64 else predicted
            log_likelihoods = torch.log_softmax(wide, dim=-1).gather(1, targets[:, None])
            yield float(log_likelihoods.sum()), bool((predicted.argmax(-1) == targets).all())


def _make_harness_model(loaded: LoadedModel, batch: int) -> Any:
    """Make what the harness calls a model. The class is made here: its base is in the optional package."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer, scorer = loaded.tokenizer, TokenScorer(loaded, batch)
    start = (*tokenizer.begin, *tokenizer.end)

    class HarnessModel(TemplateLM):  # type: ignore[misc]
        """A loaded model, asked by the harness."""

        @property
        def eot_token_id(self) -> int:
            """Return the token that ends a document."""
            if not tokenizer.end:
                raise UserError("--tasks: the tokenizer has no token that ends a document; give another --tokenizer")
            return int(tokenizer.end[-1])

        @property
        def prefix_token_id(self) -> int:
            """Return the token before a text without a context."""
            return int(start[0]) if start else self.eot_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            """Return the tokens of a text."""
            (tokens,) = tokenizer.encode([string.encode()])
            begin = () if add_special_tokens is False else tokenizer.begin
            return [*begin, *map(int, tokens)]

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return list(scorer.score([(context, continuation) for _, context, continuation in requests]))

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            """Return the log likelihood of whole texts, in windows that a model can read."""
            values = []
            for request in requests:
                tokens = self.tok_encode(request.args[0], add_special_tokens=False)
                windows = get_rolling_token_windows(tokens, self.prefix_token_id, scorer.length, 1)
                pairs = [make_disjoint_window(window) for window in windows]
                values.append(sum(value for value, _ in scorer.score(pairs)))
            return values

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            """Return what follows each prompt, up to the first of the texts that end it."""
            return [_generate_until(loaded, scorer.length, *request.args) for request in requests]

    return HarnessModel()


def _generate_until(loaded: LoadedModel, length: int, prompt: str, settings: dict[str, Any]) -> str:
    """Return the text after a prompt. length: tokens that the model reads at once. settings: those of the task."""
    until = settings.get("until") or []
    ends = [until] if isinstance(until, str) else list(until)
    temperature = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
    tokens = min(int(settings.get("max_gen_toks") or _MAX_NEW_TOKENS), length - 1)
    tokenizer = loaded.tokenizer
    (encoded,) = tokenizer.encode([prompt.encode()])
    room = length - tokens - len(tokenizer.begin)
    if len(encoded) > room:  # the end of a long prompt, as in the harness
        prompt = tokenizer.decode(encoded[len(encoded) - room :])
    (text,) = generate_texts(loaded, [prompt], GenerateOptions(tokens=tokens, temperature=temperature))
    positions = [position for end in ends if end and (position := text.find(end)) >= 0]
    return text[: min(positions)] if positions else text
