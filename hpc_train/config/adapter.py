"""conf/adapter: fine-tuning with small trained matrices added to frozen weights."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field


@config_dataclass
class AdapterConfig:
    """LoRA (Hu et al. 2021, arXiv:2106.09685) and DoRA (Liu et al. 2024, arXiv:2402.09353)."""

    kind: str = config_field(default="none", choices=("none", "lora", "dora"))
    """none: train all parameters. lora: freeze them, and add scaled B A to the weights of `targets`. dora: also train
    the length of each row of these weights."""
    targets: list[str] = config_field(default=[])
    """Globs over module names: the linear layers that get an adapter. Empty: all those inside of blocks, so not the
    output layer, but for routers of experts; of a model without blocks, all."""
    rank: int = config_field(default=8, ge=1, le=1 << 16)
    """Rows of A and columns of B."""
    alpha: float = config_field(default=16.0, gt=0)
    """B A is multiplied by alpha / rank."""
    dropout: float = config_field(default=0.0, ge=0, lt=1)
    """Probability of dropping an input of A."""
    base: str = config_field(default="full", choices=("full", "bf16", "nf4"))
    """How the frozen weights of linear layers inside of blocks are kept. full: as the precision stores them. bf16: in
    bfloat16, in half of the memory; with precision=bf16 products are the same. nf4: in 4 bits (QLoRA); of a model of
    transformers with weights, and checkpoints then have the adapters only."""
    path: str | None = None
    """Folder with adapter_model.safetensors and adapter_config.json, as PEFT writes them, to start from; None: B starts
    at zero, so that the first step begins with the model as it is."""
