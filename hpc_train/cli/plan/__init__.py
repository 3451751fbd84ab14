"""hpc-train plan and its subcommands: search, rehearse, validate, fit, calibrate, and the schedules of pipelines."""
