"""Commands about runs that exist: their state, logs, results and reports, and how to stop or resume them."""
