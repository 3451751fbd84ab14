"""`hpc-train generate`: let a trained model continue a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from hpc_train.cli.arguments import add_examples, add_json, add_weights, choose_device, whole_number

_MAX_PROMPT_BYTES = 64 << 20


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    command.add_argument("where", metavar="RUN", help="run directory, step-<n>, or a folder of transformers")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="prompt; repeatable")
    source.add_argument("--file", metavar="FILE", help="file with one prompt per line")
    command.add_argument("--tokens", metavar="N", type=whole_number(1), default=128, help="new tokens (default 128)")
    command.add_argument(
        "--temperature", metavar="T", type=_number(0, 100), default=0.0, help="sampling temperature (default 0: greedy)"
    )
    command.add_argument(
        "--top-k",
        metavar="K",
        type=whole_number(0),
        default=0,
        help="sample from the K likeliest tokens (default 0: all)",
    )
    command.add_argument(
        "--top-p",
        metavar="P",
        type=_number(1e-6, 1),
        default=1.0,
        help="sample from the likeliest tokens with probability P in total (default 1: all)",
    )
    command.add_argument(
        "--seed", metavar="N", type=whole_number(0), default=0, help="seed of the sampling (default 0)"
    )
    command.add_argument("--batch", metavar="N", type=whole_number(1), default=8, help="prompts in a batch (default 8)")
    command.add_argument(
        "--chat", action="store_true", help="treat prompts as messages of a user, with the chat template"
    )
    command.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer to use (default: the run's)")
    add_weights(command)
    command.add_argument("--base", metavar="FOLDER", help="where the run's model.path is now, if it was moved")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="device to compute on (default: cuda if there is one)"
    )
    add_json(command, "print one JSON line per prompt")
    add_examples(
        command,
        "hpc-train generate runs/first --prompt 'def main(' --tokens 200",
        "hpc-train generate runs/tuned --file questions.txt --chat --temperature 0.7 --top-p 0.9 --json",
    )
    command.set_defaults(run=_generate)


def _number(lowest: float, highest: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value <= highest:  # NaN, too
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {lowest:g} to {highest:g}")
        return value

    return parse


def _check_sampling(args: argparse.Namespace) -> None:
    """Raise UserError for limits of sampling where nothing is sampled."""
    from hpc_train.errors import UserError

    for option, is_set in (("--top-k", args.top_k > 0), ("--top-p", args.top_p < 1)):
        if is_set and args.temperature == 0:
            raise UserError(
                f"{option}: has no effect without sampling: the likeliest token is taken; add --temperature 1, or "
                f"leave out {option}"
            )


def _generate(args: argparse.Namespace) -> int:
    _check_sampling(args)
    prompts = _check_prompts(args.prompt) if args.prompt else _read_prompts(Path(args.file))
    from hpc_train.cli.output import print_json
    from hpc_train.inference.generate import GenerateOptions, generate_texts
    from hpc_train.inference.load_model import load_model

    options = GenerateOptions(
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        chat=args.chat,
        batch=args.batch,
    )
    loaded = load_model(args.where, args.tokenizer, choose_device(args.device), args.base, args.weights)
    is_answer = args.chat or loaded.has_encoder  # not what goes on behind the prompt
    if len(prompts) == 1 and not args.json:
        shown = generate_texts(loaded, prompts, options, _show_at_once)  # before the prompt, which it may refuse
        sys.stdout.write("" if is_answer else prompts[0])
        for _ in shown:
            print()
        return 0
    for prompt, text in zip(prompts, generate_texts(loaded, prompts, options), strict=True):
        if args.json:
            print_json({"prompt": prompt, "text": text})
        else:
            print(text if is_answer else prompt + text)
            print("---")
    return 0


def _show_at_once(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _check_prompts(prompts: list[str]) -> list[str]:
    """Return the prompts of the command line. Raises UserError for one in another encoding, as Python hands it on."""
    from hpc_train.errors import UserError

    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError("--prompt: is not text in UTF-8; convert it (iconv -f ENCODING -t UTF-8)") from error
    return prompts


def _read_prompts(path: Path) -> list[str]:
    from hpc_train.errors import UserError
    from hpc_train.regular_files import read_regular

    try:
        text = read_regular(path.expanduser(), _MAX_PROMPT_BYTES, follow=True).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--file {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--file {path}: is not text in UTF-8 (byte {error.start})") from error
    # Not splitlines: a prompt may hold a form feed, or another end of a line that editors do not show as one.
    prompts = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not prompts:
        raise UserError(f"--file {path}: has no prompt; write one per line")
    return prompts
