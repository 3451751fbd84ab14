"""A plain FSDP2 loop, as in torchtitan. The lines that hpc_train needs end in `# hpc_train`.

torchrun --nproc-per-node=2 --standalone examples/fsdp2_loop.py --dir checkpoints/fsdp2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import hpc_train  # hpc_train

VOCABULARY, WIDTH, LENGTH, GLOBAL_BATCH = 64, 32, 16, 12


class Block(nn.Module):
    """Causal attention and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, WIDTH) -> the same."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (4, -1)).transpose(1, 2).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
        return out


class LanguageModel(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N, T, VOCABULARY)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def main() -> None:
    """Train and save every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    data = torch.randint(0, VOCABULARY, (100, LENGTH + 1))
    model = LanguageModel().double()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    first = 0
    order = hpc_train.SampleOrder(len(data), seed=1)  # hpc_train
    checkpointer = hpc_train.Checkpointer(options.dir, keep=3)  # hpc_train
    loaded = checkpointer.load_latest(model=model, optimizer=optimizer)  # hpc_train
    if loaded is not None:  # hpc_train
        first = loaded.step  # hpc_train
        scheduler.load_state_dict(loaded.extra["scheduler"])  # hpc_train
    with checkpointer, hpc_train.Preemption() as preemption:  # hpc_train
        for step in range(first, options.steps):
            rows = data[order.batch(step * GLOBAL_BATCH, GLOBAL_BATCH, rank, ranks)]  # hpc_train
            out = model(rows[:, :-1])
            loss = nn.functional.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            extra = {"scheduler": scheduler.state_dict()}  # hpc_train
            checkpointer.save_async(step + 1, model=model, optimizer=optimizer, extra=extra)  # hpc_train
            if preemption.should_stop():  # hpc_train
                preemption.requeue()  # hpc_train
    if rank == 0:
        print(f"done: step {options.steps}, loss {loss.item() if first < options.steps else float('nan'):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
