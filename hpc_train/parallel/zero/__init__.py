"""The zero strategies: what is sharded over data-parallel ranks (fully_shard), and where the shards live."""
