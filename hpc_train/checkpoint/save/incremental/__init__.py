"""Write only what has changed since the last committed step, and hard-link the files with everything else.

Every rank splits its tensors into runs of rows and compares their digests with those of the step before. Unchanged runs
stay in a file of an earlier step, which gets a hard link in the new step. So every step is complete: it can be read,
moved and removed alone, and the file system counts the links.

A file is shared only while at least half of its bytes are still used, and a step shares at most the few files that are
used most. Other unchanged runs are written again into a file of their own, which later steps can share whole.

A process shares only files that it has written itself, in a step that it saw committed, so the first save after a
resume writes everything. Damage to a shared file damages all steps that share it; checkpoint.whole_every limits that:
one save in so many writes everything.

row_runs.py cuts tensors into runs, step_delta.py says which are shared and which written, delta_files.py links and
writes the files, and incremental_writer.py decides and remembers.
"""
