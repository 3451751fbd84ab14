"""`python -m hpc_train`: the command line, for launchers that want a module (torchrun -m hpc_train train)."""

import sys

from hpc_train.cli.main import main

sys.exit(main())
