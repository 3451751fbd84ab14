"""conf/model and conf/data: the models that can be trained, and what they are trained on.

The first field of each option is its kind; groups.SCHEMAS names the dataclass of each kind.
"""

from __future__ import annotations

from typing import Any

from omegaconf import MISSING

from hpc_train.config.schema import config_dataclass, config_field


@config_dataclass
class ModelConfig:
    """Fields that every model has; the kinds below add their own."""

    kind: str = MISSING
    """Name in the registry of models: transformer, vit, hf, custom."""
    name: str = MISSING
    """Name of the model in logs, plans and checkpoints."""


@config_dataclass
class ExpertsConfig:
    """Mixture of experts: a router sends each token to `top_k` of `count` feed-forward layers (Shazeer et al. 2017,
    arXiv:1701.06538)."""

    count: int = config_field(default=0, ge=0)
    """Routed experts of a layer; 0: every feed-forward layer is dense."""
    top_k: int = config_field(default=2, ge=1)
    """Routed experts that compute a token. If two scores are equal, the expert with the lower index is chosen."""
    feed_forward: int | None = config_field(default=None, ge=1)
    """Width of an expert; None: model.feed_forward."""
    shared: int = config_field(default=0, ge=0)
    """Experts that compute every token (Dai et al. 2024, arXiv:2401.06066), as one layer of their summed width."""
    first_dense: int = config_field(default=0, ge=0)
    """Layers at the beginning that have a dense feed-forward layer."""
    gate: str = config_field(default="softmax", choices=("softmax", "sigmoid"))
    """Scores of the router; sigmoid as in DeepSeek-V3 (arXiv:2412.19437)."""
    normalise: bool = True
    """Divide the scores of a token's chosen experts by their sum."""
    scale: float = config_field(default=1.0, gt=0)
    """Factor on the weights of the routed experts."""
    groups: int = config_field(default=1, ge=1)
    """Equal groups of experts, of which a token may use `top_groups` (arXiv:2412.19437, section 2.1.2)."""
    top_groups: int = config_field(default=1, ge=1)
    """Groups that a token may use: those with the highest sum of their two best scores."""
    balance_loss: float = config_field(default=0.0, ge=0)
    """Coefficient of an auxiliary loss for equal loads; 0: none. It is computed for each sequence (arXiv:2412.19437,
    equations 17 to 20), because only that is the same at any micro-batch and layout; `loss` in metrics is without."""
    balance_bias: float = config_field(default=0.0, ge=0)
    """Step of a bias on the scores for equal loads without a loss (Wang et al. 2024, arXiv:2408.15664); 0: no bias.
    After each update it is raised for experts below the mean load of the global batch, and lowered for those above."""
    capacity_factor: float | None = config_field(default=None, gt=0)
    """Tokens of a sequence that an expert takes, as a multiple of the mean load; later ones are dropped, which means
    that this expert adds nothing to them. None: dropless."""


@config_dataclass
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values of all heads are expanded from
    one narrow vector a token, and positions are in a part of each key that all heads share."""

    kv_rank: int = config_field(default=0, ge=0)
    """Width of the latent of keys and values (kv_lora_rank); 0: attention with keys and values of their own."""
    q_rank: int | None = config_field(default=None, ge=1)
    """Width of the latent of queries (q_lora_rank); None: queries come from the hidden states."""
    nope_head_dim: int = config_field(default=128, ge=1)
    """Width of the part of a query or key that has no positions (qk_nope_head_dim)."""
    rope_head_dim: int = config_field(default=64, ge=2)
    """Width of the part that rotary positions turn (qk_rope_head_dim)."""
    value_head_dim: int = config_field(default=128, ge=1)
    """Width of a value (v_head_dim); at most that of a query."""
    interleaved: bool = True
    """Rotary positions turn channels 2 i and 2 i + 1 as in DeepSeek's checkpoints; else i and i + rope_head_dim / 2."""


@config_dataclass
class RopeConfig:
    """Details of rotary positions, under the names and with the meaning that transformers gives them."""

    local_theta: float | None = config_field(default=None, gt=0)
    """Base of the rotary frequencies of layers with a sliding window, which then take no scaling (Gemma 3: 10000);
    None: rope_theta."""
    original_positions: int = config_field(default=8192, ge=1)
    """llama3 and yarn: positions that the model was trained with before (original_max_position_embeddings)."""
    low: float = config_field(default=1.0, gt=0)
    """llama3: frequencies that turn less often than this over the original positions are divided by rope_factor."""
    high: float = config_field(default=4.0, gt=0)
    """llama3: those that turn more often than this stay as they are."""
    beta_slow: float = config_field(default=1.0, gt=0)
    """yarn: as low."""
    beta_fast: float = config_field(default=32.0, gt=0)
    """yarn: as high."""
    truncate: bool = True
    """yarn: round the bounds between both to whole pairs of channels."""
    table_factor: float | None = config_field(default=None, gt=0)
    """yarn: factor on cosines and sines (attention_factor); None: from mscale, else 0.1 ln(rope_factor) + 1."""
    mscale: float = config_field(default=0.0, ge=0)
    """yarn: with mscale_all_dim, the table's factor is the quotient of 0.1 m ln(rope_factor) + 1 for both m."""
    mscale_all_dim: float = config_field(default=0.0, ge=0)
    """yarn: in latent attention (DeepSeek-V3: 1) scores are multiplied by the square of 0.1 m ln(rope_factor) + 1."""


@config_dataclass
class TransformerConfig(ModelConfig):
    """A decoder-only transformer of the Llama or the GPT family."""

    kind: str = "transformer"
    """Always transformer."""
    source: list[str] = config_field(default=[])
    """Public pages that the shape comes from."""
    vocab_size: int = config_field(default=256, ge=2)
    """Tokens of the vocabulary, and rows of the embedding."""
    layers: int = config_field(default=4, ge=1)
    """Transformer blocks."""
    hidden: int = config_field(default=128, ge=1)
    """Width of the residual stream."""
    heads: int = config_field(default=4, ge=1)
    """Query heads."""
    kv_heads: int | None = config_field(default=None, ge=1)
    """Key and value heads (grouped-query attention); None: as many as heads."""
    head_dim: int | None = config_field(default=None, ge=1)
    """None: hidden / heads."""
    feed_forward: int = config_field(default=384, ge=1)
    """Width of the feed-forward layer (of each of its two branches for swiglu and geglu)."""
    activation: str = config_field(default="swiglu", choices=("swiglu", "geglu", "gelu", "gelu_tanh"))
    """Activation of the feed-forward layer; geglu: the gated one with the tanh approximation of GELU (Gemma)."""
    norm: str = config_field(default="rmsnorm", choices=("rmsnorm", "rmsnorm_1p", "layernorm"))
    """Normalisation before attention, before the feed-forward layer and before the head. rmsnorm_1p multiplies by one
    plus its weight (Gemma)."""
    pre_norms: bool = True
    """Normalise the inputs of attention and of the feed-forward layer; OLMo 2 and 3, without, have only post_norms."""
    post_norms: bool = False
    """Normalise the results of attention and of the feed-forward layer (Gemma 2, OLMo 2)."""
    scaled_embeddings: bool = False
    """Multiply embeddings by sqrt(hidden) (Gemma)."""
    norm_eps: float = config_field(default=1e-5, gt=0)
    """Added to the variance in a norm."""
    positions: str = config_field(default="rotary", choices=("rotary", "learned"))
    """rotary: rotary position embeddings (Su et al. 2021, arXiv:2104.09864); learned: a table of max_positions rows."""
    rope_theta: float = config_field(default=10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: str = config_field(default="none", choices=("none", "linear", "llama3", "yarn"))
    """Scaling of the rotary frequencies for longer contexts: of all alike (linear, arXiv:2306.15595), or of the low
    ones as in Llama 3.1 (llama3) or in YaRN (arXiv:2309.00071; DeepSeek-V3). model.rope has their bounds."""
    rope_factor: float = config_field(default=8.0, ge=1)
    """How much scaled frequencies are slowed down: 8 in Llama 3.1, 32 in Llama 3.2, 40 in DeepSeek-V3."""
    rope: RopeConfig = config_field(default=RopeConfig)
    max_positions: int = config_field(default=2048, ge=1)
    """Longest sequence (rows of a learned position table)."""
    bias: bool = False
    """Biases in linear layers (GPT family) and in layernorm."""
    tied_embeddings: bool = False
    """Use the embedding's matrix as the head too."""
    dropout: float = config_field(default=0.0, ge=0, lt=1)
    """Probability of dropping an activation after attention, feed-forward and embedding, and an attention weight."""
    init_std: float = config_field(default=0.02, gt=0)
    """Standard deviation of initial weights."""
    query_key_norm: str = config_field(default="none", choices=("none", "head", "full"))
    """RMSNorm of queries and keys before rotary positions: of each head (Qwen3) or of all heads together (OLMo)."""
    sliding_window: int | None = config_field(default=None, ge=1)
    """Keys that a token sees, its own and those just before it (Beltagy et al. 2020, arXiv:2004.05150; Mistral); None:
    all that are not behind it."""
    global_every: int = config_field(default=0, ge=0)
    """With a window, every so-many-th layer has none: 2 as in Gemma 2, 4 as in OLMo 3, 6 as in Gemma 3; 0: no layer."""
    attention_scale: float | None = config_field(default=None, gt=0)
    """Factor on the products of queries and keys; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = config_field(default=None, gt=0)
    """Soft-cap c of attention scores, c tanh(score / c) (Gemma 2, arXiv:2408.00118: 50); None: none."""
    logit_softcap: float | None = config_field(default=None, gt=0)
    """Soft-cap of logits (Gemma 2: 30); None: none."""
    attention: str = config_field(default="auto", choices=("auto", "cudnn", "flash", "efficient", "math", "flex"))
    """Kernel of attention: a backend of torch's scaled_dot_product_attention, or FlexAttention (flex). auto: torch's
    own choice, and on GPUs flex for windows, soft-caps and packed documents. The log says what is used."""
    latent: LatentConfig = config_field(default=LatentConfig)
    experts: ExpertsConfig = config_field(default=ExpertsConfig)


@config_dataclass
class VisionTransformerConfig(ModelConfig):
    """A vision transformer classifier (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

    kind: str = "vit"
    """Always vit."""
    source: list[str] = config_field(default=[])
    """Public pages that the shape comes from."""
    image_size: int = config_field(default=8, ge=1)
    """Height and width of an image, pixels."""
    patch_size: int = config_field(default=2, ge=1)
    """Height and width of a patch, pixels; divides image_size."""
    channels: int = config_field(default=1, ge=1)
    """Colour channels of an image."""
    classes: int = config_field(default=10, ge=2)
    """Classes to tell apart."""
    layers: int = config_field(default=4, ge=1)
    """Transformer blocks."""
    hidden: int = config_field(default=64, ge=1)
    """Width of the residual stream."""
    heads: int = config_field(default=4, ge=1)
    """Attention heads."""
    feed_forward: int = config_field(default=256, ge=1)
    """Width of the feed-forward layer."""
    norm_eps: float = config_field(default=1e-6, gt=0)
    """Added to the variance in a norm."""
    dropout: float = config_field(default=0.0, ge=0, lt=1)
    """Probability of dropping an activation."""
    init_std: float = config_field(default=0.02, gt=0)
    """Standard deviation of initial weights."""


@config_dataclass
class CustomModelConfig(ModelConfig):
    """A user's own module, by the name it was registered under."""

    kind: str = "custom"
    """Always custom."""
    name: str = MISSING
    """Name given to `hpc_train.models.register`, or of an entry point in the group hpc_train.models."""
    module: str | None = None
    """Python module to import first, where the decorator is; None for an installed entry point."""
    args: dict[str, Any] = config_field(default={})
    """Keyword arguments of the registered function."""


@config_dataclass
class HfModelConfig(ModelConfig):
    """A model of the transformers library, from a folder that save_pretrained made."""

    kind: str = "hf"
    """Always hf."""
    name: str = "hf"
    """Name of the model in logs and checkpoints."""
    path: str = MISSING
    """Folder with config.json and, to fine-tune, weights in model.safetensors or in numbered files with an index."""
    task: str = config_field(
        default="auto", choices=("auto", "causal_lm", "masked_lm", "seq2seq_lm", "image_classification")
    )
    """Training task; auto: that of the class in config.json (architectures)."""
    weights: str = config_field(default="auto", choices=("auto", "read", "draw"))
    """read: begin with the folder's weights; draw: from scratch; auto: read them if the folder has any."""
    attention: str = config_field(
        default="auto", choices=("auto", "eager", "sdpa", "flash_attention_2", "flex_attention")
    )
    """Attention that transformers computes with; auto: its own choice. Context parallelism brings its own."""
    experts: str = config_field(default="auto", choices=("auto", "eager", "batched_mm", "grouped_mm"))
    """How transformers multiplies with the experts of a mixture; auto: its own choice. float64 needs eager."""
    mask_token: int | None = config_field(default=None, ge=0)
    """masked_lm: the token that hides others; null: the one that the folder's tokenizer has."""
    mixed_dtypes: bool = False
    """Accept files whose weights have several floating-point types; each is cast to what the precision stores."""


@config_dataclass
class DataConfig:
    """Fields that every data set has; the kinds below add their own."""

    kind: str = MISSING
    """tokens, mixture, images, image_files or custom."""
    name: str = MISSING
    """Name of the data set in logs and in the run's configuration."""
    validation_fraction: float = config_field(default=0.02, ge=0, lt=1)
    """Part of the data kept for validation, taken from its end; 0: no validation."""


@config_dataclass
class CustomDataConfig(DataConfig):
    """A user's own data set, by the name it was registered under."""

    kind: str = "custom"
    """Always custom."""
    name: str = MISSING
    """Name given to `hpc_train.components.register_dataset`, or of an entry point in the group hpc_train.datasets."""
    module: str | None = None
    """Python module to import first, where the decorator is; None for an installed entry point."""
    args: dict[str, Any] = config_field(default={})
    """Keyword arguments of the registered function."""
    resume: str = config_field(default="exact", choices=("exact", "beginning"))
    """How an iterable data set goes on after a resume. exact: where it was, on the same number of data-parallel ranks;
    beginning: at its beginning."""


@config_dataclass
class TokenDataConfig(DataConfig):
    """Text as tokens: one HDF5 store, built once from files if it is not there yet."""

    kind: str = "tokens"
    """Always tokens."""
    path: str | None = None
    """A token store made by `hpc-train data build`, or a token file of another program (see data=tokens); None: a store
    built from `sources` into `cache` at first use."""
    dtype: str | None = config_field(default=None, choices=("uint16", "uint32"))
    """Type of the tokens in a raw token file; all others say it themselves."""
    separator: int | None = config_field(default=None, ge=0)
    """Token that ends a document in a token file that does not say where documents begin."""
    sources: list[str] = config_field(default=[])
    """Files or folders of text, JSON Lines (plain, gzip, zstd), JSON arrays of objects, CSV, Parquet or Arrow,
    recognised by content; the word `stdlib` stands for the source code of the running Python's standard library."""
    suffixes: list[str] = config_field(default=[".py", ".txt", ".md", ".rst"])
    """Files taken from a folder; if it has none of them, its files of records are taken."""
    column: str | None = None
    """Column of JSON, CSV, Parquet and Arrow to read; None: text, or messages for a chat."""
    chat: bool = False
    """Records are conversations for the tokenizer's chat template; only the assistant's turns count in the loss."""
    tokenizer: str = "byte"
    """byte: one token per byte; bpe: byte-pair encoding, trained on the text; else a tokenizer.json, or a folder with
    one as transformers saves it."""
    end_of_document: str | None = None
    """Token after every document, for a tokenizer from a folder; None: its own choice, else its eos_token."""
    vocab_size: int = config_field(default=256, ge=256, le=1 << 31)
    """Size of the vocabulary that is trained on the text (bpe), or that a token file of another program has; the byte
    tokenizer always has 256."""
    samples: str | None = config_field(default=None, choices=("stream", "padded", "packed"))
    """stream: sequences cut out of all text one after another; padded: a document a sample, the rest of the sequence
    without targets, and a longer document in several samples; packed: several whole documents a sample, none of which
    sees another. None: padded for chats, else stream."""
    cache: str = "${oc.env:HPC_TRAIN_CACHE,'~/.cache/hpc_train'}"
    """Folder of the stores that are built; it must be visible from the compute nodes."""


@config_dataclass
class MixtureDataConfig(DataConfig):
    """Several token stores or token files, mixed by weights that may change during the run."""

    kind: str = "mixture"
    """Always mixture."""
    paths: list[str] = config_field(default=[])
    """Token stores made by `hpc-train data build` with the same tokenizer, or token files (see data=tokens)."""
    weights: list[float] = config_field(default=[])
    """Share of each source in the samples, in any unit; empty: all the same."""
    later_tokens: list[int] = config_field(default=[])
    """Tokens of the run after which weights change, once for each entry."""
    later_weights: list[float] = config_field(default=[])
    """Weights from there on: those of every source for the first entry of later_tokens, then for the second, ..."""
    samples: str | None = config_field(default=None, choices=("stream", "padded", "packed"))
    """As of data=text, for all sources."""
    separator: int | None = config_field(default=None, ge=0)
    """As of data=tokens, for all sources that do not say where documents begin."""
    dtype: str | None = config_field(default=None, choices=("uint16", "uint32"))
    """As of data=tokens, for all sources that are raw tokens."""
    vocab_size: int = config_field(default=256, ge=256, le=1 << 31)
    """As of data=tokens, for all sources that are token files of other programs."""


@config_dataclass
class ImageDataConfig(DataConfig):
    """Labelled images that come with a package."""

    kind: str = "images"
    """Always images."""
    name: str = config_field(default="digits", choices=("digits",))
    """digits: 1,797 8x8 grey images of handwritten digits that ship with scikit-learn."""


@config_dataclass
class ImageFilesDataConfig(ImageDataConfig):
    """Labelled images in files: a store made by `hpc-train data build`, or folders and tars to make one from."""

    kind: str = "image_files"
    """Always image_files."""
    name: str = "images"
    """Name of the data set in logs and in the run's configuration."""
    path: str | None = None
    """An image store; None: a store built from `sources` into `cache` at first use."""
    sources: list[str] = config_field(default=[])
    """Folders whose sub-folders are the classes, and tars of WebDataset or folders of them."""
    label_key: str = "label"
    """Key of the class in the .json files of a tar; a .cls file goes before."""
    validation_path: str | None = None
    """An image store to evaluate on; None: `validation_fraction` of the images, drawn once and for all."""
    image_size: int = config_field(default=224, ge=1, le=8192)
    """Height and width of a sample, pixels."""
    channels: int = config_field(default=3, ge=1, le=3)
    """3: red, green, blue; 1: grey."""
    augment: str = config_field(default="crop", choices=("crop", "none"))
    """Training samples. crop: a part of the image, drawn for each position in the run, half of them flipped; none: the
    middle, as in validation."""
    crop_area: float = config_field(default=0.08, gt=0, le=1)
    """Smallest share of an image's area that a drawn crop shows."""
    centre_crop: float = config_field(default=0.875, gt=0, le=1)
    """Side of the square in the middle, as a share of the image's shorter side."""
    mean: list[float] = config_field(default=[])
    """Subtracted from each channel, whose values lie between 0 and 1; empty: the mean of ImageNet."""
    std: list[float] = config_field(default=[])
    """Each channel is divided by it; empty: the standard deviation of ImageNet."""
    decode_threads: int = config_field(default=4, ge=1, le=256)
    """Threads of each rank that decode images."""
    cache: str = "${oc.env:HPC_TRAIN_CACHE,'~/.cache/hpc_train'}"
    """Folder of the stores that are built; it must be visible from the compute nodes."""
