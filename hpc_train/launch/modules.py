"""cluster.modules in a batch script: `module` made known, each module loaded, and the attempt ended where one is not.

Batch scripts are no login shells, so that `module` is often undefined there, and a plain script goes on without it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from hpc_train.config.cluster import ClusterConfig
from hpc_train.errors import EXIT_NO_REQUEUE, UserError

LIST = "modules.txt"
"""In an attempt's folder: what was loaded."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/@=~-]*")

_FUNCTIONS = f"""\
no_module() {{
  why="$1: $(tr -s '[:space:]' ' ' <<<"$2" | tr -cd 'A-Za-z0-9 ._/:,()+@=-' | cut -c 1-300)" doing=""
  echo "hpc-train: $why"
  exit {EXIT_NO_REQUEUE}
}}
know_module() {{
  local init
  type module >/dev/null 2>&1 && return
  for init in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/{{lmod,z00_lmod,modules}}.sh \\
    /usr/share/lmod/{{lmod,*}}/init/bash /usr/share/{{modules,Modules}}/init/bash /opt/cray/pe/lmod/lmod/init/bash; do
    [ ! -r "$init" ] || . "$init" >/dev/null 2>&1
    type module >/dev/null 2>&1 && return
  done
  no_module cluster.modules "neither Lmod nor Environment Modules is on $(hostname)"
}}
use_modules() {{
  [ -d "$1" ] || no_module "cluster.module_path" "$1 is not there on $(hostname)"
  module use "$1"
}}
is_loaded() {{
  module is-loaded "$1" >/dev/null 2>&1 && return
  case ":$LOADEDMODULES:" in *":$1:"* | *":$1/"*) ;; *) return 1 ;; esac
}}
load_module() {{
  local said="$logs/.module" before="$LOADEDMODULES"
  module load "$1" >"$said" 2>&1 || no_module "cluster.modules: $1 cannot be loaded" "$(cat "$said")"
  cat "$said"
  if is_loaded "$1"; then
    loaded+=("$1")
  elif [ "$before" = "$LOADEDMODULES" ]; then
    no_module "cluster.modules: $1 was not loaded" "$(cat "$said")"
  fi
  rm -f "$said"
}}
keep_modules() {{
  local name
  for name in "${{loaded[@]}}"; do
    is_loaded "$name" || no_module "cluster.modules: $name" "a later one of the list has unloaded it"
  done
  module -t list >"$logs/{LIST}" 2>&1
}}"""
"""What is said on failure is put where a JSON string and a status line can hold it. An alias has no name of its own in
what is loaded, so that for it the change of the list tells."""


def loading(cluster: ClusterConfig) -> list[str]:
    """Shell lines for a script whose `$logs` is the attempt's folder; they end it with 93 where a module is missing.

    Raises UserError for a name that is none.
    """
    _check(cluster)
    if not (cluster.modules or cluster.module_path or cluster.module_purge):
        return []
    return [
        *_FUNCTIONS.splitlines(),
        "loaded=()",
        "know_module",
        *(["module purge"] if cluster.module_purge else []),
        *(f"use_modules {path}" for path in _quoted(cluster.module_path)),
        *(f"load_module {name}" for name in _quoted(cluster.modules)),
        "keep_modules",
    ]


def _quoted(names: Sequence[str]) -> list[str]:
    return [shlex.quote(name) for name in names]


def _check(cluster: ClusterConfig) -> None:
    for name in cluster.modules:
        if not _NAME.fullmatch(name):
            raise UserError(f"cluster.modules: {name!r} is not the name of a module, such as cuda/12.4")
    for path in cluster.module_path:
        if not path.startswith("/") or ":" in path or not path.isprintable():
            raise UserError(f"cluster.module_path: {path!r} is not the absolute path of a folder of modulefiles")
