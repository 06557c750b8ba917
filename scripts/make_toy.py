"""Make a toy task that a tiny model learns on two CPU cores in a minute: sorting digits.

A problem is `9141=`, its answer `1149` (3 to 8 digits). In `sft.jsonl` most demonstrations are
mistaken: they sort the wrong way round. Fine-tuning copies that mixture; RL with an exact-match
reward then picks the right behaviour out of it. (RL selects what the model can do already, it does
not teach sorting.) Preference pairs say the same: the chosen response is the sorted number, the
rejected one is sorted the wrong way round, or right up to one mistake. So the best policy is known,
and no shortcut such as length tells the two apart.

    python scripts/make_toy.py --output_dir runs/toy

writes `model/` (random Qwen3, 0.43M parameters, character tokenizer), `sft.jsonl` and
`sft_eval.jsonl` (prompt, completion), `rl.jsonl` and `eval.jsonl` (prompt, answer), `pairs.jsonl`
and `pairs_eval.jsonl` (prompt, chosen, rejected). No multiset of digits that occurs in an eval file
occurs in a training file, in any order.
"""

import argparse
import hashlib
import json
import random
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = string.digits + string.ascii_lowercase + "+-*/()=,. \n"
VOCABULARY = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
MAX_POSITIONS = 256


def held_out(digits: str) -> bool:
    """Whether a problem belongs to the eval files: decided by its digits, whatever their order."""
    key = "".join(sorted(digits)).encode()
    return hashlib.sha256(key).digest()[0] % 10 == 0


def draw_problem(rng: random.Random, *, evaluation: bool) -> str:
    """A random string of 3 to 8 digits from the training or from the held-out problems."""
    while True:
        digits = "".join(rng.choices(string.digits, k=rng.randint(3, 8)))
        if held_out(digits) == evaluation:
            return digits


def sft_row(rng: random.Random, *, mistaken: float, evaluation: bool) -> dict[str, str]:
    """A demonstration; with probability `mistaken` its digits are in descending order."""
    digits = draw_problem(rng, evaluation=evaluation)
    completion = sorted(digits, reverse=rng.random() < mistaken)
    return {"prompt": f"{digits}=", "completion": "".join(completion)}


def rl_row(rng: random.Random, *, evaluation: bool) -> dict[str, str]:
    """A problem with its answer."""
    digits = draw_problem(rng, evaluation=evaluation)
    return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def pair_row(rng: random.Random, *, evaluation: bool) -> dict[str, str]:
    """A problem with its answer and a wrong one of the same length."""
    while True:
        digits = draw_problem(rng, evaluation=evaluation)
        chosen = sorted(digits)
        rejected = list(chosen)
        kind = rng.randrange(4)
        if kind < 2:  # as in most demonstrations
            rejected.reverse()
        elif kind == 2:  # two digits exchanged
            i, j = rng.sample(range(len(digits)), 2)
            rejected[i], rejected[j] = rejected[j], rejected[i]
        else:  # one digit misread
            rejected[rng.randrange(len(digits))] = rng.choice(string.digits)
        if rejected != chosen:
            return {
                "prompt": f"{digits}=",
                "chosen": "".join(chosen),
                "rejected": "".join(rejected),
            }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, plus padding, end of sequence and unknown."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # the default would put spaces between the characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights (f32). vLLM's attention on the CPU needs head_dim >= 32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[VOCABULARY[EOS]], pad_token_id=VOCABULARY[PAD]
    )
    return model


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_toy(
    output_dir: Path,
    *,
    seed: int,
    num_sft: int,
    num_rl: int,
    num_pairs: int,
    num_eval: int,
    mistaken: float,
) -> None:
    """Write model, tokenizer and the six data files; the same arguments give the same bytes."""
    output_dir.mkdir(parents=True, exist_ok=True)

    def rng(name: str) -> random.Random:
        return random.Random(f"{seed}/{name}")  # changing one file's size leaves the others alone

    r = rng("sft")
    sft = [sft_row(r, mistaken=mistaken, evaluation=False) for _ in range(num_sft)]
    write_jsonl(output_dir / "sft.jsonl", sft)
    r = rng("sft_eval")
    sft_eval = [sft_row(r, mistaken=mistaken, evaluation=True) for _ in range(num_eval)]
    write_jsonl(output_dir / "sft_eval.jsonl", sft_eval)
    r = rng("rl")
    write_jsonl(output_dir / "rl.jsonl", [rl_row(r, evaluation=False) for _ in range(num_rl)])
    r = rng("eval")
    write_jsonl(output_dir / "eval.jsonl", [rl_row(r, evaluation=True) for _ in range(num_eval)])
    for name, count, evaluation in (("pairs", num_pairs, False), ("pairs_eval", num_eval, True)):
        r = rng(name)
        pairs = [pair_row(r, evaluation=evaluation) for _ in range(count)]
        write_jsonl(output_dir / f"{name}.jsonl", pairs)

    logging.disable_progress_bar()
    make_tokenizer().save_pretrained(output_dir / "model")
    make_model(seed).save_pretrained(output_dir / "model")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=32_000, help="demonstrations")
    parser.add_argument("--num_rl", type=int, default=4_000, help="RL problems")
    parser.add_argument("--num_pairs", type=int, default=16_000, help="preference pairs")
    parser.add_argument("--num_eval", type=int, default=512, help="rows of each eval file")
    parser.add_argument(
        "--mistaken", type=float, default=0.6, help="fraction of demonstrations that are reversed"
    )
    args = parser.parse_args()
    for name in ("num_sft", "num_rl", "num_pairs", "num_eval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}={getattr(args, name)} must be at least 1")
    if not 0 <= args.mistaken <= 1:
        parser.error(f"--mistaken={args.mistaken} must be between 0 and 1")
    make_toy(**vars(args))
    print(f"toy task in {args.output_dir}: model, {args.num_sft} demonstrations,", end=" ")
    print(f"{args.num_rl} RL problems, {args.num_pairs} pairs, {args.num_eval} held-out problems")


if __name__ == "__main__":
    main()
