"""Which combinations of techniques exist, checked before any rank is started. No torch in this package.

One file per axis checks its options; check.py has their order; support_table.py is the table in docs/parallelism.md,
whose rows are in support_rows/.
"""
