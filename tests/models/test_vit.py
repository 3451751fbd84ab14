"""The vision transformer learns real images."""

import torch
from model_shapes import load
from sklearn.datasets import load_digits

from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model


def test_the_default_model_learns_handwritten_digits() -> None:
    model = build_model(load("vit_tiny"))
    initialise_parameters(model, 0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, seen = order[:300], order[300:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(120):
        batch = seen[(torch.arange(64) + 64 * step) % len(seen)]
        optimizer.zero_grad()
        (model.loss_sum(model(images[batch]), labels[batch]) / 64).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(images[held_out]).argmax(-1) == labels[held_out]).float().mean().item()
    assert accuracy > 0.85
