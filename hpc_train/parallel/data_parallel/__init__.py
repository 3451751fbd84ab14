"""Data parallelism: whole copies (ddp), or shards of parameters, gradients and optimizer state (fully_shard)."""
