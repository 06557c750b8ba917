"""Tiny tokenizers and models that tests build in a second: byte-level BPE, two layers, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

Flavour = Literal["distinct", "pad_is_eos", "no_pad", "no_template"]

FLAVOURS: tuple[Flavour, ...] = ("distinct", "pad_is_eos", "no_pad", "no_template")
SPECIAL = ("<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>")
# "he" + "llo" decode to "hello", which encodes to one id; "=1" merges over a prompt's end
MERGES = ("h e", "l l", "ll o", "he llo", "= 1", "1 2")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(
    flavour: Flavour = "distinct",
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos: bool = True,
    add_eos: bool = False,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 267 ids; the post-processor adds BOS (and EOS) to text, the template a BOS.

    Flavours: `distinct` (bos, eos and pad differ), `pad_is_eos`, `no_pad`, `no_template` (distinct
    ids, no chat template).
    """
    symbols = [
        *SPECIAL,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(m.replace(" ", "") for m in MERGES),
    ]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    bpe = Tokenizer(
        models.BPE(vocab=vocab, merges=[(a, b) for a, b in (m.split(" ") for m in MERGES)])
    )
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    bpe.add_special_tokens(special)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    single = " ".join(["<bos>"] * add_bos + ["$A"] + ["<eos>"] * add_eos)
    bpe.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(t, vocab[t]) for t in ("<bos>", "<eos>")]
    )
    names: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
    if flavour != "no_pad":
        names["pad_token"] = "<eos>" if flavour == "pad_is_eos" else "<pad>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **names)
    tokenizer.chat_template = None if flavour == "no_template" else chat_template
    return tokenizer


# what the common settings are called elsewhere, and what an architecture needs beyond them
_EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 32},
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
}


def full(tensor: Any) -> Any:
    """The whole of a sharded tensor; one rank in float32 has plain ones."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def make_tiny_model(
    directory: str | Path,
    arch: str = "qwen3",
    *,
    flavour: Flavour = "distinct",
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **config_overrides: Any,
) -> Path:
    """Save a random float32 model with tokenizer: hidden 64, 2 layers, 2 heads of 32, 320 tokens.

    Args:
        directory: created if missing; loads with `AutoModelForCausalLM.from_pretrained`.
        arch: model type of transformers: qwen2, qwen3, llama, mistral, gemma2, gemma3_text, phi3,
            gpt2, ...
        flavour, tokenizer: see `make_tokenizer`; its 267 ids leave padding rows at the end.
        seed: of the weights; the global generator is left as it was.
        config_overrides: for example `tie_word_embeddings=False`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = tokenizer or make_tokenizer(flavour)
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    if arch == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        settings |= {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512} | dropout
    else:
        settings |= {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 512,
        }
    config = AutoConfig.for_model(arch, **settings | _EXTRA.get(arch, {}) | config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Path(directory)
