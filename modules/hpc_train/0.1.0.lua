-- hpc_train 0.1.0 for Lmod. The installation is where this tree of modulefiles lies, wherever that is moved:
--     ROOT/modules/hpc_train/0.1.0.lua    this file
--     ROOT/.venv/bin or ROOT/bin          the commands, of a checkout or of an environment
-- The Tcl twin beside it does the same; tests/modules holds them to that.

local version = myModuleVersion()
local file    = myFileName()
local root    = file:match("^(.*)/[^/]+/[^/]+/[^/]+$")
local env     = isDir(pathJoin(root, ".venv")) and pathJoin(root, ".venv") or root

help([[
hpc_train trains PyTorch models on Slurm clusters from one configuration.

    hpc-train doctor             what works here, what does not, what to do
    hpc-train submit --dry-run   the batch script of a run
    hpc-train --help             all commands
]])

whatis("Name: hpc_train")
whatis("Version: " .. version)
whatis("Category: machine learning, tools")
whatis("Keywords: PyTorch, Slurm, distributed training, parallelism, checkpoints")
whatis("Description: Describe, plan, submit, place, train, checkpoint and resume PyTorch runs on Slurm clusters")

conflict("hpc_train")

if mode() == "load" and not isFile(pathJoin(env, "bin/hpc-train")) then
    LmodError("hpc_train: no bin/hpc-train in " .. root .. "/.venv or in " .. root .. "; install it there, or move this tree")
end

pushenv("HPC_TRAIN_ROOT", root)
prepend_path("PATH", pathJoin(env, "bin"))
