"""`hpc-train completion`: print the completion scripts of the shells, and answer what they ask.

The scripts call `hpc-train completion query`. The candidates come from the parser, the schema and the names of
the files in conf/. Hydra's own completion composes a configuration, which takes too long for a key press.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from itertools import pairwise
from typing import Any, get_origin, get_type_hints

from hpc_train.cli.arguments import add_examples, find_innermost_parser, list_options

_BASH = r"""_hpc_train() {
    local line="${COMP_LINE:0:COMP_POINT}" current before="" candidate
    local -a words
    read -ra words <<<"$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[${#words[@]}-1]}"
    # Readline takes `key=value` for two words, and replaces the second only.
    [[ "$COMP_WORDBREAKS" == *=* ]] && before="${current%"${current##*=}"}"
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$before"}")
    done < <("${words[0]/#\~/$HOME}" completion query -- "${words[@]:1}" 2>/dev/null)
    # A key goes on with a value or with the next key: no space after it.
    case "${COMPREPLY[*]-}" in *= | *.) compopt -o nospace 2>/dev/null ;; esac
}
complete -o bashdefault -o default -F _hpc_train hpc-train
"""
_ZSH = r"""#compdef hpc-train
_hpc_train() {
    local -a candidates keys values
    local command="${words[1]/#\~/$HOME}"
    candidates=("${(@f)$("$command" completion query -- "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}")
    keys=("${(@M)candidates:#*[=.]}")
    values=("${(@)candidates:#*[=.]}")
    values=("${(@)values:#}")
    if (( ! $#keys && ! $#values )); then
        compset -P '*='
        _files
        return
    fi
    (( $#keys )) && compadd -S '' -- "${keys[@]}"
    (( $#values )) && compadd -- "${values[@]}"
}
if [[ "${funcstack[1]-}" == _hpc_train ]]; then
    _hpc_train "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
    compdef _hpc_train hpc-train
fi
"""
_FISH = r"""function __hpc_train
    set -l words (commandline --cut-at-cursor --tokenize --current-process)
    set -l current (commandline --cut-at-cursor --current-token)
    set -l found (command hpc-train completion query -- $words[2..-1] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        set -l key (string match --regex '^.*=' -- "$current")
        __fish_complete_path (string replace --regex '^.*=' '' -- "$current") | string replace --regex '^' "$key"
    end
end
complete --command hpc-train --no-files --arguments '(__hpc_train)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_BOOLEANS = ("true", "false")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    command.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "query"),
        help="shell whose script to print; query: print the completions of a command line",
    )
    command.add_argument("words", nargs="*", help="query only: -- and the words after hpc-train")
    add_examples(command, 'eval "$(hpc-train completion bash)"', "hpc-train completion query -- train model=llama_")
    command.set_defaults(run=_complete)


def _complete(args: argparse.Namespace) -> int:
    from hpc_train.cli.main import join_plan_command, make_parser

    if args.shell != "query":
        print(completion_script(args.shell), end="")
        return 0
    line = join_plan_command(args.words[1:] if args.words[:1] == ["--"] else args.words)
    for candidate in complete_words(make_parser(line), line):
        print(candidate)
    return 0


def completion_script(shell: str) -> str:
    """Return the script to evaluate in `bash`, `zsh` or `fish`."""
    return _SCRIPTS[shell]


def complete_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return candidates for the last of the words after `hpc-train`, which may be empty.

    The list is empty where the shell should complete file names.
    """
    *before, current = words or [""]
    parser, before = find_innermost_parser(parser, before)
    # argparse has no public list of its options.
    actions = parser._actions
    if current.startswith("-"):
        return _select_by_prefix(current, list_options(parser))
    if before and (option := _takes_value(actions, before[-1])):
        return _select_by_prefix(current, map(str, option.choices or ()))
    positional = [action for action in actions if not action.option_strings]
    if any(action.dest == "overrides" for action in positional):
        return complete_override(current, before)
    if any(action.dest == "key" for action in positional):
        return complete_key(current)
    return _select_by_prefix(current, (str(choice) for action in positional for choice in action.choices or ()))


def _takes_value(actions: Sequence[argparse.Action], flag: str) -> argparse.Action | None:
    return next((action for action in actions if flag in action.option_strings and action.nargs != 0), None)


def _select_by_prefix(current: str, candidates: Iterable[str]) -> list[str]:
    return sorted({candidate for candidate in candidates if candidate.startswith(current)})


def complete_key(current: str) -> list[str]:
    """Complete a configuration key up to its next dot, over all kinds of model and data."""
    from hpc_train.config.keys.reference import list_keys

    depth = current.count(".")
    parts = [item.key.split(".") for item in list_keys()]
    names = (".".join(part[: depth + 1]) + ("." if len(part) > depth + 1 else "") for part in parts)
    return _select_by_prefix(current, names)


def complete_override(current: str, before: Sequence[str]) -> list[str]:
    """Complete an override: its key up to the next dot, or its value. The words before it choose the model."""
    from hpc_train.config.keys.groups import GROUPS, find_option_files

    sign = current[: len(current) - len(current.lstrip("+~"))]
    key, equals, _ = current.removeprefix(sign).partition("=")
    config_dir = _find_config_dir(before)
    if not equals:
        return _select_by_prefix(current, (f"{sign}{name}" for name in _list_next_keys(key, before, config_dir)))
    if key in GROUPS:
        return _select_by_prefix(current, (f"{key}={name}" for name in find_option_files(key, config_dir)))
    return _select_by_prefix(current, (f"{sign}{key}={value}" for value in _list_values(key, before, config_dir)))


def _find_config_dir(before: Sequence[str]) -> str | None:
    directories = [following for word, following in pairwise(before) if word == "--config-dir"]
    directories += [word.partition("=")[2] for word in before if word.startswith("--config-dir=")]
    return directories[-1] if directories else None


def _list_next_keys(key: str, before: Sequence[str], config_dir: str | None) -> Iterator[str]:
    """List the keys next to `key`: `optim.` has more below it, `optim.lr=` takes a value."""
    from hpc_train.config.keys.groups import GROUPS

    parent, dot, _ = key.rpartition(".")
    node = _find_schema_at(parent, before, config_dir) if dot else _run_config()
    if not dot:
        yield from (f"{group}=" for group in GROUPS)
    for item in fields(node) if node else ():
        deeper = is_dataclass(_find_field_type(node, item)) or get_origin(_find_field_type(node, item)) is dict
        yield f"{parent}{dot}{item.name}{'.' if deeper else '='}"


def _list_values(key: str, before: Sequence[str], config_dir: str | None) -> tuple[str, ...]:
    """List the legal values of a choice or a boolean; empty for other types."""
    parent, _, name = key.rpartition(".")
    node = _find_schema_at(parent, before, config_dir) if parent else _run_config()
    item = next((item for item in fields(node) if item.name == name), None) if node else None
    if node is None or item is None:
        return ()
    limits = item.metadata.get("range")
    if limits is not None and limits.choices:
        return tuple(limits.choices)
    return _BOOLEANS if _find_field_type(node, item) is bool else ()


def _run_config() -> type:
    from hpc_train.config.run import RunConfig

    return RunConfig


def _find_schema_at(path: str, before: Sequence[str], config_dir: str | None) -> Any:
    """Find the dataclass at a dotted path, given the options chosen before; None if there is none."""
    node: Any = _run_config()
    for depth, name in enumerate(path.split(".")):
        item = next((item for item in fields(node) if item.name == name), None)
        if item is None:
            return None
        node = (_find_chosen_schema(name, before, config_dir) if depth == 0 else None) or _find_field_type(node, item)
        if not is_dataclass(node):
            return None
    return node


def _find_field_type(node: Any, item: Field[Any]) -> Any:
    return get_type_hints(node)[item.name]


def _find_chosen_schema(group: str, before: Sequence[str], config_dir: str | None) -> type | None:
    """Return the schema of the option chosen for a group whose options differ in type (model, data); else None."""
    from hpc_train.config.keys.groups import SCHEMAS, find_option_type, read_default_options

    if group not in SCHEMAS:
        return None
    options = [word.partition("=")[2] for word in before if word.startswith(f"{group}=")]
    option = options[-1] if options else read_default_options()[group]
    return find_option_type(group, option, config_dir)
