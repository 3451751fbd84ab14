"""Sphinx settings: `make docs` builds the pages of this folder, and the man pages, without a network."""

from __future__ import annotations

import hpc_train

project = "hpc_train"
author = "the hpc_train developers"
version = release = hpc_train.__version__
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"hpc_train {version}"
myst_heading_anchors = 3
exclude_patterns = ["reference/man"]
# Links to files of the repository outside this folder are right on a code host and have no page here.
suppress_warnings = ["myst.xref_missing"]
man_pages = [("reference/commands", "hpc-train", "train PyTorch models on Slurm clusters", [author], 1)]
