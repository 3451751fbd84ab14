"""Every private API of torch that this project uses, each with the reason why no public one will do.

A private API may change with any release, so no other folder names one: a new torch is checked against these files.

versions.py        the versions that the tests pass on
process_groups.py  process groups, meshes, collectives
dtensor.py         which part of a DTensor a rank holds
fully_shard.py     the parameter groups of FSDP2
pipeline.py        stages and schedules of torch.distributed.pipelining
attention.py       fused attention with its log-sum-exp
tensors.py         many tensors in one kernel, memory of a tensor, compilation of a function
observation.py     waits, streams, memory, graph breaks
rehearsal.py       tensors without memory, for `plan rehearse`
"""
