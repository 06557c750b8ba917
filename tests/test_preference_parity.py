"""DPO and reward models against a peer: TRL's trainers on the same pairs give the same tokens,
losses, gradients, weights and evaluation.

The peer runs its own code from the data file to the optimizer step. Both sides read the same file
and the same checkpoints.
"""

import math
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import dpo
import reward_model
from common.data import TokenRow
from common.logprobs import compute_logprobs, compute_scores
from common.model import load_model, load_tokenizer
from common.packing import PackedRow
from common.pairs import PairDataset, load_pairs
from tests.launch import metrics, run
from tests.test_scores import plain, tiny
from tests.test_sft_parity import (
    assert_same_rows,
    no_launcher,  # noqa: F401  a fixture of every test here
    one_process,
    row_order,
    tiny_model,
    turns,
    write,
)
from tests.tiny import CHAT_TEMPLATE, Flavour, full, make_tokenizer

trl = pytest.importorskip("trl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is experimental
    from trl.experimental.cpo import CPOConfig, CPOTrainer

MAX_TOKENS = 256
# Measured: losses 4e-7, gradients 3e-6 of the parameter's largest one.
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
RUN_TOLERANCE = 2e-5  # of what is logged once weights differ by rounding

Row = dict[str, Any]
Sides = list[tuple[TokenRow, TokenRow]]  # chosen and rejected

# ---- rows ----------------------------------------------------------------------------------------

# Very unequal lengths, so that a mean over all tokens of a batch would differ from one over pairs.
# Responses may begin alike, or spell their EOS. No token merges over a prompt's end: there TRL
# leaves the prompt's last token out, while we keep the ids from which a rollout starts.
TEXTS: list[Row] = [
    {"prompt": "hello", "chosen": " x", "rejected": " hello 12 y" * 6},
    {"prompt": "a long question: " + "hello 12 " * 9, "chosen": "no", "rejected": "z"},
    {"prompt": "q ", "chosen": "hello " * 12 + "\n\n12 naïve 日本 ", "rejected": "hello hello"},
    {"prompt": "2+2", "chosen": " is 4<eos>", "rejected": " is 5"},
    {"prompt": "hello hello\n", "chosen": "12 12 12", "rejected": "12 12 12 12"},
]
TEXT_MARGINS = (0.5, 0.0, 1.25, -0.75, 2.0)


def answer(content: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": content}]


CHATS: list[Row] = [
    {"prompt": turns("hello"), "chosen": answer("12"), "rejected": answer("hello " * 14)},
    {
        "prompt": turns("q1", "hello " * 9, "q2", system="be brief"),
        "chosen": answer("no " * 7),
        "rejected": answer("12\n\n12 "),
    },
    {"prompt": turns("hello 12 " * 9), "chosen": answer("a"), "rejected": answer(" b ")},
    {"prompt": turns("q1", "a1", "q2"), "chosen": answer("日本 12"), "rejected": answer("日本")},
]
# Like the usual template, but nothing follows the last turn's stop token: see
# `test_what_trl_trains_beyond_an_answer`.
CLOSED_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|im_end|>\n",
    "<|im_end|>{% if add_generation_prompt or not loop.last %}{{ '\n' }}{% endif %}",
)
KINDS = {"texts": TEXTS, "chats": CHATS}


def tokenizer_of(kind: str, flavour: Flavour = "distinct") -> PreTrainedTokenizerBase:
    """For texts as they are, or for chats that end with their stop token."""
    return make_tokenizer(
        "no_template" if kind == "texts" else flavour, chat_template=CLOSED_TEMPLATE
    )


# ---- both sides ----------------------------------------------------------------------------------


@dataclass
class Result:
    """What one side computes of a file of pairs."""

    sides: Sides
    losses: list[float] = field(default_factory=list)
    """of each optimizer step"""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """of the last step, before clipping"""


def our_pairs(
    data: Path, tokenizer: PreTrainedTokenizerBase, *, for_scoring: bool, **settings: Any
) -> PairDataset:
    settings = {"max_tokens": MAX_TOKENS} | settings
    return load_pairs([str(data)], tokenizer, for_scoring=for_scoring, **settings)[0]


def our_sides(pairs: PairDataset) -> Sides:
    return [(pair.chosen, pair.rejected) for pair in pairs]


# All pairs in one forward with every prompt twice; in several forwards with each prompt once.
LAYOUTS = ((False, 2000), (True, 130))  # prefix_sharing, max_tokens


def layouts(pairs: PairDataset) -> Iterator[list[PackedRow]]:
    """The rows of a step over all pairs, in each layout; reward_model.py has the same functions."""
    for prefix_sharing, max_tokens in LAYOUTS:
        plan = dpo.plan_pairs(
            pairs,
            list(range(len(pairs))),
            world_size=1,
            max_tokens=max_tokens,
            packing=True,
            prefix_sharing=prefix_sharing,
        )
        assert (len(plan[0]) > 1) == prefix_sharing
        yield [dpo.pack_pairs(pairs, members, prefix_sharing=prefix_sharing) for members in plan[0]]


def take_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    gradients = {name: full(p.grad).cpu() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def our_policy_steps(
    policy: Path,
    reference: Path | None,
    data: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    means: bool,
    sft_coef: float = 0.0,
    **settings: Any,
) -> list[Result]:
    """One step of dpo.py over all pairs, in each layout; without a reference, as for simpo, its
    log-probs are 0."""
    pairs = our_pairs(data, tokenizer, for_scoring=False)
    num_tokens = int(pairs.num_targets[:, 0].sum())
    results: list[Result] = []
    with one_process() as env:
        model = load_model(str(policy), env, dtype=torch.float32)
        if reference is not None:
            frozen = load_model(str(reference), env, dtype=torch.float32, trainable=False)
        for rows in layouts(pairs):
            total = 0.0
            for row in (row.to(env.device) for row in rows):
                logprobs = compute_logprobs(model, row)[0]
                ref_logprobs = torch.zeros_like(logprobs)
                if reference is not None:
                    with torch.no_grad():
                        ref_logprobs = compute_logprobs(frozen, row)[0]
                ratios = dpo.log_ratios(row, logprobs - ref_logprobs, means=means)
                loss = dpo.preference_loss(*ratios, **settings).sum() / len(pairs)
                loss = loss - sft_coef * row.sum_sequences(logprobs)[0::2].sum() / num_tokens
                loss.backward()
                total += loss.item()
            results.append(Result(our_sides(pairs), [total], take_gradients(model)))
    return results


def our_reward_steps(
    path: Path, data: Path, tokenizer: PreTrainedTokenizerBase, *, center_coef: float = 0.0
) -> tuple[list[Result], list[Tensor]]:
    """One step of reward_model.py over all pairs, in each layout; also the (P, 2) scores."""
    pairs = our_pairs(data, tokenizer, for_scoring=True)
    results: list[Result] = []
    all_scores: list[Tensor] = []
    with one_process() as env:
        model = load_model(str(path), env, dtype=torch.float32, head="score")
        for rows in layouts(pairs):
            total, scores = 0.0, torch.zeros(len(pairs), 2)
            for row in rows:
                members = [s // 2 for s in row.sequence_ids[0::2]]
                of_row = compute_scores(model, row.to(env.device))
                loss = reward_model.bradley_terry_loss(
                    *(of_row[0::2], of_row[1::2]),
                    torch.from_numpy(pairs.margins[members]).to(of_row),
                    label_smoothing=0.0,
                    center_coef=center_coef,
                ).sum() / len(pairs)
                loss.backward()
                total += loss.item()
                scores[members] = of_row.detach().view(-1, 2).cpu()
            results.append(Result(our_sides(pairs), [total], take_gradients(model)))
            all_scores.append(scores)
    return results, all_scores


def peer(
    trainer_class: Any,
    config_class: Any,
    model_path: Path,
    data: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    reference: Path | None = None,
    evaluation: Path | None = None,
    train: bool = True,
    **settings: Any,
) -> tuple[Result, Any]:
    """A real trainer in float32 that takes the pairs in the file's order, all in a batch unless the
    settings say otherwise; also the trainer itself, for its log and its weights."""
    from datasets import load_dataset

    result = Result([])

    class Recorded(trainer_class):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
            """TRL's forward and backward; the gradients are those accumulated so far."""
            loss = super().training_step(model, *args, **kwargs)
            step = self.state.global_step
            result.losses.extend([0.0] * (step + 1 - len(result.losses)))
            result.losses[step] += loss.item()
            result.gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            return loss

    folder = data.parent / "peer"

    def read(path: Path) -> Any:
        cache = str(folder / "cache")
        return load_dataset("json", data_files=str(path), split="train", cache_dir=cache)

    def load(path: Path) -> Any:
        kind: Any = AutoModelForCausalLM
        extra: Row = {}
        if trainer_class is trl.RewardTrainer:
            kind, extra = AutoModelForSequenceClassification, {"num_labels": 1}
        return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **extra)

    train_dataset = read(data)
    defaults: Row = {"max_steps": 1, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    defaults |= {"per_device_train_batch_size": len(train_dataset), "max_length": MAX_TOKENS}
    config = config_class(
        output_dir=str(folder),
        train_sampling_strategy="sequential",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **defaults | settings,
    )
    models = {"model": load(model_path)}
    if reference is not None:
        models["ref_model"] = load(reference)
    trainer = Recorded(
        **models,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=None if evaluation is None else read(evaluation),
        processing_class=tokenizer,
    )
    result.sides = peer_sides(trainer)
    if train:
        trainer.train()
    return result, trainer


def peer_sides(trainer: Any) -> Sides:
    """TRL's own preparation of the pairs. Nothing is a target of a reward model."""
    sides: Sides = []
    for example in trainer.train_dataset:
        pair: list[TokenRow] = []
        for name in ("chosen", "rejected"):
            if isinstance(trainer, trl.RewardTrainer):
                ids = example[f"{name}_ids"]
                mask = [False] * len(ids)
            elif isinstance(trainer, CPOTrainer):
                ids = example[f"{name}_input_ids"]
                mask = [label != -100 for label in example[f"{name}_labels"]]
            else:
                prompt, response = example["prompt_ids"], example[f"{name}_ids"]
                ids = prompt + response
                mask = [t >= len(prompt) for t in range(len(ids))]
            pair.append(TokenRow(ids, mask))
        sides.append((pair[0], pair[1]))
    return sides


# ---- comparison ----------------------------------------------------------------------------------


def assert_same_sides(sides: Sides, expected: Sides) -> None:
    for column in (0, 1):
        assert_same_rows([pair[column] for pair in sides], [pair[column] for pair in expected])


def assert_same_step(result: Result, expected: Result) -> None:
    assert result.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert result.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        largest = gradient.abs().max()
        assert largest > 0, name
        error = (result.gradients[name] - gradient).abs().max()
        assert error <= GRADIENT_TOLERANCE * largest, f"{name}: {error / largest:.2g}"


def assert_same_weights(ours: Path, before: Path, trainer: Any) -> None:
    """AdamW divides a gradient by its own size, so rounding decides where a gradient is almost
    nothing: single weights may differ by as much as a step."""
    old, new = (load_file(path / "model.safetensors") for path in (before, ours))
    weights = trainer.model.state_dict()
    assert new.keys() == old.keys()
    for name, tensor in new.items():
        error, update = (tensor - weights[name]).abs(), (weights[name] - old[name]).abs()
        assert update.max() > 1e-4, name
        assert error.max() <= 1e-4, name
        assert (error > 2e-6).sum() <= 1e-3 * error.numel(), name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A reference, and a policy that has moved away from it in all its weights."""
    reference = tiny_model(tmp_path_factory.mktemp("reference"))
    return perturbed(reference, tmp_path_factory.mktemp("policy") / "model"), reference


def perturbed(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(source / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- DPO: one step -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings, their_settings",
    [
        ({"loss": "sigmoid"}, {"loss_type": "sigmoid"}),
        (
            {"loss": "sigmoid", "means": True, "beta": 2.0},
            {"loss_type": "sigmoid_norm", "beta": 2.0},
        ),
        (
            {"loss": "sigmoid", "sft_coef": 0.3},
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
        ),
        ({"loss": "ipo", "means": True}, {"loss_type": "ipo"}),
        ({"loss": "hinge", "beta": 0.3}, {"loss_type": "hinge", "beta": 0.3}),
        (
            {"loss": "robust", "label_smoothing": 0.2},
            {"loss_type": "robust", "label_smoothing": 0.2},
        ),
        # cDPO: DPOTrainer does not smooth its sigmoid. Its aot does, and sorts the pairs of a
        # forward, which changes nothing where there is one.
        (
            {"loss": "sigmoid", "label_smoothing": 0.2},
            {"loss_type": "aot", "label_smoothing": 0.2, "per_device_train_batch_size": 1},
        ),
    ],
    ids=["sigmoid", "sigmoid of means", "sigmoid and sft", "ipo", "hinge", "robust", "cdpo"],
)
def test_losses_of_dpo(
    tmp_path: Path, models: tuple[Path, Path], settings: Row, their_settings: Row, kind: str
) -> None:
    """P25, P27: the same tokens, loss and gradients where the policy has left the reference."""
    policy, reference = models
    tokenizer = tokenizer_of(kind)
    data = write(tmp_path / "pairs.jsonl", KINDS[kind])
    per_forward = their_settings.get("per_device_train_batch_size", len(KINDS[kind]))
    expected, trainer = peer(
        *(trl.DPOTrainer, trl.DPOConfig, policy, data, tokenizer),
        reference=reference,
        gradient_accumulation_steps=len(KINDS[kind]) // per_forward,
        **their_settings,
    )
    assert trainer.state.global_step == 1
    settings = {"means": False, "beta": 0.1} | settings
    for result in our_policy_steps(policy, reference, data, tokenizer, **settings):
        assert_same_sides(result.sides, expected.sides)
        assert_same_step(result, expected)
    # and not the loss that policies without a difference from their reference have
    zero = torch.zeros(1, dtype=torch.float64)
    settings = {k: v for k, v in settings.items() if k not in ("means", "sft_coef")}
    assert abs(result.losses[0] - dpo.preference_loss(zero, zero, **settings).item()) > 1e-2


@pytest.mark.parametrize(
    "loss, label_smoothing, sft_coef",
    [("simpo", 0.0, 0.0), ("simpo", 0.2, 0.4), ("sigmoid", 0.2, 0)],
)
def test_losses_without_a_reference(
    tmp_path: Path, models: tuple[Path, Path], loss: str, label_smoothing: float, sft_coef: float
) -> None:
    """SimPO, and DPO's sigmoid if the reference were uniform; the peer is the CPOTrainer, which
    writes the term of RPO as `cpo_alpha`."""
    tokenizer = tokenizer_of("texts")
    data = write(tmp_path / "pairs.jsonl", TEXTS)
    shared: Row = {"beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": label_smoothing}
    expected, _ = peer(
        *(CPOTrainer, CPOConfig, models[0], data, tokenizer),
        loss_type=loss,
        cpo_alpha=sft_coef,
        **shared,
    )
    settings: Row = {"loss": loss, "means": loss == "simpo", "sft_coef": sft_coef}
    for result in our_policy_steps(models[0], None, data, tokenizer, **settings, **shared):
        assert_same_sides(result.sides, expected.sides)
        assert_same_step(result, expected)


@pytest.mark.parametrize("flavour", ["distinct", "pad_is_eos"])
def test_other_models_and_padding(tmp_path: Path, flavour: Flavour) -> None:
    """Gemma 2: soft caps and a window shorter than the prompts that are laid out once."""
    tokenizer = tokenizer_of("chats", flavour)
    reference = tiny_model(tmp_path, "gemma2", sliding_window=8, tokenizer=tokenizer)
    policy = perturbed(reference, tmp_path / "policy")
    data = write(tmp_path / "pairs.jsonl", CHATS)
    expected, _ = peer(trl.DPOTrainer, trl.DPOConfig, policy, data, tokenizer, reference=reference)
    settings: Row = {"loss": "sigmoid", "means": False, "beta": 0.1}
    for result in our_policy_steps(policy, reference, data, tokenizer, **settings):
        assert_same_sides(result.sides, expected.sides)
        assert_same_step(result, expected)


def test_what_trl_trains_beyond_an_answer(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """TRL trains all that a template renders after the prompt. What no engine would sample is no
    target of ours: the text behind the stop token, and the user's turns in a response of several.
    """
    several = {
        "prompt": turns("q1"),
        "chosen": turns("", "a1", "q2", "a2")[1:],
        "rejected": answer("no"),
    }
    tokenizer = make_tokenizer()
    data = write(tmp_path / "pairs.jsonl", [*CHATS, several])
    result = our_sides(our_pairs(data, tokenizer, for_scoring=False))
    expected, _ = peer(
        trl.DPOTrainer, trl.DPOConfig, models[0], data, tokenizer, reference=models[1], train=False
    )
    extra: list[str] = []
    for pair, their_pair in zip(result, expected.sides, strict=True):
        for row, theirs in zip(pair, their_pair, strict=True):
            length = len(row.input_ids)
            assert theirs.input_ids[:length] == row.input_ids
            mask = row.loss_mask + [False] * (len(theirs.input_ids) - length)
            assert all(t or not m for m, t in zip(mask, theirs.loss_mask, strict=True))
            unsampled = [
                i
                for i, mine, yours in zip(theirs.input_ids, mask, theirs.loss_mask, strict=True)
                if yours and not mine
            ]
            extra.append(str(tokenizer.decode(unsampled)))
    between = "\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"
    assert extra == ["\n"] * 8 + [between + "\n", "\n"]


def test_prompts_that_rows_do_not_name(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """Of conversations both take the turns that both sides begin with as the prompt. In texts TRL's
    responses begin with the first character that differs; ours begin after HH-RLHF's mark, or else
    with a word: what comes before them is a prompt from which a rollout could start."""
    whole = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in CHATS]
    tokenizer = tokenizer_of("chats")
    data = write(tmp_path / "chats.jsonl", whole)
    result = our_sides(our_pairs(data, tokenizer, for_scoring=False))
    settings: Row = {"reference": models[1], "train": False}
    expected, _ = peer(trl.DPOTrainer, trl.DPOConfig, models[0], data, tokenizer, **settings)
    assert_same_sides(result, expected.sides)

    question = "\n\nHuman: q1\n\nAssistant:"
    rows = [
        {"chosen": question + " yes, 12", "rejected": question + " yes, no"},
        {"chosen": "the day ended well", "rejected": "the day endured"},
    ]
    tokenizer = tokenizer_of("texts")
    data = write(tmp_path / "texts.jsonl", rows)
    result = our_sides(our_pairs(data, tokenizer, for_scoring=False))
    expected, _ = peer(trl.DPOTrainer, trl.DPOConfig, models[0], data, tokenizer, **settings)
    texts: list[tuple[str, str]] = []
    for pair, their_pair in zip(result, expected.sides, strict=True):
        for row, theirs in zip(pair, their_pair, strict=True):
            assert row.input_ids == theirs.input_ids
            mine, yours = (
                str(tokenizer.decode(r.input_ids[r.loss_mask.index(True) :])) for r in (row, theirs)
            )
            texts.append((mine, yours))
    assert texts == [
        (" yes, 12<eos>", " 12<eos>"),
        (" yes, no<eos>", " no<eos>"),
        (" ended well<eos>", "ed well<eos>"),
        (" endured<eos>", "ured<eos>"),
    ]


# ---- reward model: one step ----------------------------------------------------------------------


def scored(folder: Path, kind: str, flavour: Flavour = "distinct") -> Path:
    """A reward model; texts are as they are, chats end with the usual template's newline."""
    tokenizer = make_tokenizer("no_template" if kind == "texts" else flavour)
    return Path(tiny(folder / "model", head=True, tokenizer=tokenizer))


def with_margins(rows: Sequence[Row]) -> list[Row]:
    return [row | {"margin": margin} for row, margin in zip(rows, TEXT_MARGINS, strict=False)]


@pytest.mark.parametrize(
    "kind, flavour", [("texts", "distinct"), ("chats", "distinct"), ("chats", "pad_is_eos")]
)
@pytest.mark.parametrize(
    "margins, center_coef",
    [(False, 0.0), (True, 0.0), (True, 0.1)],
    ids=["plain", "margin", "center"],
)
def test_losses_of_reward_models(
    tmp_path: Path, kind: str, flavour: Flavour, margins: bool, center_coef: float
) -> None:
    """P28: the same tokens, loss and gradients, those of the head included."""
    model = scored(tmp_path, kind, flavour)
    rows = KINDS[kind]
    if kind == "texts":  # both tokenise prompt and response as one text
        rows = [*rows[:-1], {"prompt": "2+2=", "chosen": "1", "rejected": "12 12"}]
    data = write(tmp_path / "pairs.jsonl", with_margins(rows) if margins else rows)
    expected, _ = peer(
        *(trl.RewardTrainer, trl.RewardConfig, model, data, load_tokenizer(str(model))),
        center_rewards_coefficient=center_coef or None,
    )
    assert "score.weight" in expected.gradients
    results, (scores, _) = our_reward_steps(
        model, data, load_tokenizer(str(model)), center_coef=center_coef
    )
    for result in results:
        assert_same_sides(result.sides, expected.sides)
        assert_same_step(result, expected)
    assert (scores[:, 0] - scores[:, 1]).abs().max() > 1


def test_whole_texts_of_reward_models(tmp_path: Path) -> None:
    """Rows without a prompt, and the same limit on both sides (P23)."""
    model = scored(tmp_path, "texts")
    question = "\n\nHuman: q1\n\nAssistant:"
    rows = [{side: question + row[side] for side in ("chosen", "rejected")} for row in TEXTS]
    data = write(tmp_path / "pairs.jsonl", rows)
    tokenizer = load_tokenizer(str(model))
    result = our_sides(our_pairs(data, tokenizer, for_scoring=True, max_tokens=60))
    expected, _ = peer(
        *(trl.RewardTrainer, trl.RewardConfig, model, data, tokenizer), train=False, max_length=60
    )
    assert len(expected.sides) == 3
    assert_same_sides(result, expected.sides)


def test_texts_that_end_with_the_padding_token(tmp_path: Path) -> None:
    """P28: TRL's classifier looks for the last token that is not padding. Where that is the EOS, it
    scores a text at the token before its EOS; ours is at the last token, as without padding."""
    model = Path(tiny(tmp_path / "model", head=True, flavour="pad_is_eos"))
    tokenizer = make_tokenizer("pad_is_eos", chat_template=None)
    data = write(tmp_path / "pairs.jsonl", TEXTS)
    expected, _ = peer(trl.RewardTrainer, trl.RewardConfig, model, data, tokenizer)
    unpadded: Any = plain(model)
    at_end, before_end = torch.zeros(len(TEXTS), 2), torch.zeros(len(TEXTS), 2)
    with torch.no_grad():
        for p, pair in enumerate(expected.sides):
            for side, row in enumerate(pair):
                ids = torch.tensor([row.input_ids])
                hidden = unpadded.base_model(ids, use_cache=False).last_hidden_state[0]
                before_end[p, side], at_end[p, side] = unpadded.score(hidden[-2:])[:, 0]
    results, all_scores = our_reward_steps(model, data, tokenizer)
    assert_same_sides(results[0].sides, expected.sides)
    for scores in all_scores:
        assert (scores - at_end).abs().max() < 1e-5
    theirs = -torch.nn.functional.logsigmoid(before_end[:, 0] - before_end[:, 1]).mean()
    assert expected.losses[0] == pytest.approx(theirs.item(), rel=1e-5)
    assert abs(expected.losses[0] - results[0].losses[0]) > 1e-2


# ---- whole runs ----------------------------------------------------------------------------------

STEPS, PAIRS_PER_STEP, SEED = 3, 4, 5
# Held-out pairs, none of them a tie, in a batch of their own: TRL averages over batches.
HELD_OUT: dict[str, list[Row]] = {
    "texts": [
        {"prompt": "held out: 12", "chosen": " hello" * 4, "rejected": " no"},
        {"prompt": "z" * 20, "chosen": "\n12", "rejected": " hello hello"},
        {"prompt": "1+1", "chosen": " is 2", "rejected": " is 12 12 12 12"},
    ],
    "chats": [
        {"prompt": turns("held out"), "chosen": answer("12 " * 4), "rejected": answer("no")},
        {"prompt": turns("a", "b", "c"), "chosen": answer("\n12"), "rejected": answer("hello 12")},
        {"prompt": turns("1+1"), "chosen": answer("is 2"), "rejected": answer("12 " * 9)},
    ],
}
# What both are to do, in our words and in TRL's.
SCHEDULES: dict[str, tuple[list[object], Row]] = {
    "constant, clipped": (
        ["--lr_schedule", "constant", "--learning_rate", 1e-4, "--packing", "False"],
        {"lr_scheduler_type": "constant", "learning_rate": 1e-4, "max_grad_norm": 1.0},
    ),
    "linear, weight decay": (
        ["--lr_schedule", "linear", "--learning_rate", 2e-4, "--max_grad_norm", 500]
        + ["--weight_decay", 0.1],
        {"lr_scheduler_type": "linear", "learning_rate": 2e-4, "max_grad_norm": 500}
        | {"weight_decay": 0.1},
    ),
    "cosine, clipped, weight decay": (
        ["--lr_schedule", "cosine", "--learning_rate", 2e-4, "--weight_decay", 0.1],
        {"lr_scheduler_type": "cosine", "learning_rate": 2e-4, "max_grad_norm": 1.0}
        | {"weight_decay": 0.1},
    ),
}


@dataclass
class Run:
    """What both sides logged and wrote."""

    ours: list[Row]
    """of each step"""
    theirs: list[Row]
    losses: list[float]
    """theirs, more exact than their log"""
    evaluations: list[tuple[Row, Row]]
    """ours and theirs, before the first and after the last step"""


def both_runs(
    folder: Path,
    script: str,
    model: Path,
    kind: str,
    schedule: str,
    *,
    margins: bool = False,
    flags: Sequence[object] = (),
    **settings: Any,
) -> Run:
    """A script from the command line and TRL's trainer, on the same pairs in the same order; checks
    the order, and that they end with the same weights."""
    rows, held_out = KINDS[kind], HELD_OUT[kind]
    if margins:
        rows, held_out = with_margins(rows), with_margins(held_out)
    data = write(folder / "pairs.jsonl", rows)
    evaluation = write(folder / "held_out.jsonl", held_out)
    our_flags, their_settings = SCHEDULES[schedule]
    out = folder / "ours"
    answered = run(
        script,
        *("--model", model, "--dataset", data, "--output_dir", out, "--num_steps", STEPS),
        *("--pairs_per_step", PAIRS_PER_STEP, "--seed", SEED, "--warmup_steps", 0),
        *("--max_sequence_tokens", MAX_TOKENS, "--max_tokens_per_microbatch", 2 * MAX_TOKENS),
        *("--eval_dataset", evaluation, "--export_dtype", "float32"),
        *("--cache_dir", folder / "cache", *our_flags, *flags),
    )
    assert answered.returncode == 0, answered.stderr[-3000:]

    order = row_order(len(rows), steps=STEPS, rows_per_step=PAIRS_PER_STEP, seed=SEED)
    assert order != sorted(order) and len(order) > len(rows)  # shuffled, into the next epoch
    classes = (trl.DPOTrainer, trl.DPOConfig)
    if script == "reward_model.py":
        classes = (trl.RewardTrainer, trl.RewardConfig)
    defaults: Row = {"max_steps": STEPS, "adam_beta2": 0.95, "per_device_train_batch_size": 2}
    defaults |= {"gradient_accumulation_steps": PAIRS_PER_STEP // 2, "eval_on_start": True}
    defaults |= {"eval_strategy": "steps", "eval_steps": STEPS}
    defaults |= {"per_device_eval_batch_size": len(held_out)}
    expected, trainer = peer(
        *(*classes, model, write(folder / "ordered.jsonl", [rows[i] for i in order])),
        load_tokenizer(str(model)),
        evaluation=evaluation,
        **defaults | their_settings | settings,
    )
    assert_same_weights(out / "final", model, trainer)
    logged = metrics(out)
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    trained = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(logged) == STEPS + 1 and len(trained) == len(expected.losses) == STEPS
    result = Run(
        logged[1:],
        trained,
        expected.losses,
        list(zip((logged[0], logged[-1]), evaluated, strict=True)),
    )
    for row, log in zip(result.ours, result.theirs, strict=True):
        assert row["optim/grad_norm"] == pytest.approx(log["grad_norm"], rel=RUN_TOLERANCE)
        assert row["optim/learning_rate"] == pytest.approx(log["learning_rate"])
    return result


def assert_same_metrics(row: Row, log: Row, names: dict[str, str]) -> None:
    for name, theirs in names.items():
        assert row[name] == pytest.approx(log[theirs], rel=RUN_TOLERANCE, abs=1e-5), name


DPO_METRICS = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
}


@pytest.mark.parametrize(
    "kind, schedule, own_reference, sft_coef",
    [
        ("texts", "linear, weight decay", True, 0.0),
        ("chats", "cosine, clipped, weight decay", False, 0.5),
    ],
)
def test_runs_of_dpo(
    tmp_path: Path, kind: str, schedule: str, own_reference: bool, sft_coef: float
) -> None:
    """Same log, same evaluation, same weights after three steps. TRL divides the SFT term by the
    tokens of a forward, not of a step: it takes a step in one forward here. In its evaluation there
    are several, so that the loss with this term is not compared."""
    model = tiny_model(tmp_path, tokenizer=tokenizer_of(kind), seed=1)
    flags: list[object] = ["--sft_coef", sft_coef]
    settings: Row = {"beta": 0.1}
    if own_reference:
        settings["reference"] = perturbed(model, tmp_path / "reference")
        flags += ["--ref_model", settings["reference"]]
    if sft_coef:
        settings |= {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, sft_coef]}
        settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    result = both_runs(tmp_path, "dpo.py", model, kind, schedule, flags=flags, **settings)
    names = {f"policy/{ours}": theirs for ours, theirs in DPO_METRICS.items()}
    names |= {"policy/chosen_logprobs": "logps/chosen"}
    names |= {"policy/rejected_logprobs": "logps/rejected"}
    if sft_coef:  # the mean of two forwards' means is another one
        names["policy/entropy"] = "entropy"
    for step, (row, log) in enumerate(zip(result.ours, result.theirs, strict=True)):
        assert row["policy/loss"] == pytest.approx(result.losses[step], rel=RUN_TOLERANCE)
        if step or own_reference:  # TRL has no ties: rounding makes wins of some
            assert_same_metrics(row, log, names)
    names = {f"eval/{ours}": f"eval_{theirs}" for ours, theirs in DPO_METRICS.items()}
    if not sft_coef:
        names["eval/loss"] = "eval_loss"
    for number, (row, log) in enumerate(result.evaluations):
        if number or own_reference:
            assert row["eval/ties"] == 0
            assert_same_metrics(row, log, names)
    if not own_reference:
        assert result.ours[0]["policy/ties"] == result.evaluations[0][0]["eval/ties"] == 1
        row = result.evaluations[0][0]
        loss = math.log(2) + sft_coef * row["eval/sft_loss"]
        assert row["eval/loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(
    "kind, schedule, margins, center_coef",
    [
        ("texts", "constant, clipped", True, 0.0),
        ("chats", "cosine, clipped, weight decay", False, 0.1),
    ],
)
def test_runs_of_reward_models(
    tmp_path: Path, kind: str, schedule: str, margins: bool, center_coef: float
) -> None:
    """As above, from a checkpoint that has a head, so that both start with the same."""
    model = scored(tmp_path, kind)
    result = both_runs(
        *(tmp_path, "reward_model.py", model, kind, schedule),
        margins=margins,
        flags=["--center_coef", center_coef],
        center_rewards_coefficient=center_coef or None,
    )
    names = {"reward/accuracy": "accuracy", "reward/margin": "margin"}
    for step, (row, log) in enumerate(zip(result.ours, result.theirs, strict=True)):
        assert row["reward/loss"] == pytest.approx(result.losses[step], rel=RUN_TOLERANCE)
        assert_same_metrics(row, log, names)
        mean = (row["reward/chosen_score"] + row["reward/rejected_score"]) / 2
        assert mean == pytest.approx(log["mean_reward"], rel=RUN_TOLERANCE)
    names = {f"eval/{name}": f"eval_{name}" for name in ("accuracy", "margin", "loss")}
    for row, log in result.evaluations:
        assert_same_metrics(row, log, names)
        mean = (row["eval/chosen_score"] + row["eval/rejected_score"]) / 2
        assert mean == pytest.approx(log["eval_mean_reward"], rel=RUN_TOLERANCE)
