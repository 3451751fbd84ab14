"""Pipeline parallelism: the model in stages over the axis pp."""
