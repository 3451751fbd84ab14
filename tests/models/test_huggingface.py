"""The mapping of weights: what old files look like, and what is refused."""

from dataclasses import replace

import pytest
import torch
from model_shapes import GPT2, LLAMA, drawn

from hpc_train.errors import UserError
from hpc_train.models.huggingface import from_huggingface, to_huggingface
from hpc_train.models.huggingface_family import find_model_family


def test_files_of_the_bare_model_with_mask_buffers_are_read() -> None:
    ours = drawn(GPT2).state_dict()
    file = {name.removeprefix("transformer."): tensor for name, tensor in to_huggingface(ours, GPT2).items()}
    file |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    back = from_huggingface(file, GPT2)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())


def test_a_copy_of_the_tied_embedding_is_dropped() -> None:
    tied = replace(LLAMA, tied_embeddings=True)
    file = to_huggingface(drawn(tied).state_dict(), tied)
    assert "lm_head.weight" not in file
    back = from_huggingface({**file, "lm_head.weight": file["model.embed_tokens.weight"]}, tied)
    assert "head.weight" not in back


def test_an_unknown_weight_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"^model\.layers\.0\.mamba\.weight: no such weight in a llama model"):
        from_huggingface({"model.layers.0.mamba.weight": torch.ones(1)}, LLAMA)


def test_a_shape_without_a_family_is_a_user_error() -> None:
    with pytest.raises(UserError, match="of none of the Llama, Gemma, OLMo, GPT-2 and ViT families"):
        find_model_family(replace(LLAMA, norm="layernorm"))
