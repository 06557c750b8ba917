"""dpo.py as users run it: the cached reference, and mistakes."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dpo
from common.cache import load_arrays, save_arrays
from common.dist import DistEnv
from common.model import load_model, load_tokenizer
from common.pairs import load_pairs
from scripts.make_toy import make_tokenizer as make_toy_tokenizer
from tests.launch import launch, metrics, same_every_time
from tests.test_invariance import pair_flags, write_pairs
from tests.test_model import env as env  # the fixture
from tests.tiny import CHAT_TEMPLATE, make_tiny_model


def train(flags: list[object], out: Path, *more: object) -> tuple[list[dict[str, float]], str]:
    answer = launch("dpo.py", *flags, "--output_dir", out, *more)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [same_every_time(row) for row in metrics(out)], answer.stdout


@pytest.mark.timeout(300)
def test_the_cache_of_reference_logprobs_cannot_go_stale(tmp_path: Path) -> None:
    """P25: a cache that outlived its model or data gave step-0 losses other than ln 2."""
    flags = pair_flags(tmp_path)
    first, said = train(flags, tmp_path / "a")
    assert (
        "train pairs: 18 computed" in said and "eval pairs: 23 computed" in said
    )  # only what the run needs
    again, said = train(flags, tmp_path / "b", "--seed", 0)
    assert said.count("pairs: from the cache") == 2 and again == first
    # same folder, same file names, other data
    write_pairs(tmp_path, num_rows=22)
    other, said = train(flags, tmp_path / "d")
    assert "computed in" in said and other[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    # without a cache the numbers are the same
    fresh, said = train(flags, tmp_path / "e", "--cache_dir", "None")
    assert fresh == other and said.count("computed in") == 2


def test_what_the_key_of_the_cache_depends_on(tmp_path: Path, env: DistEnv) -> None:
    """P25; a changed rope_theta of --ref_model once went unnoticed: it is in no weight."""
    path = make_tiny_model(tmp_path / "model")
    pairs = [str(write_pairs(tmp_path))]

    def key(*, max_tokens: int = 96, wanted: int = 5, dtype: str = "float32") -> str:
        model = load_model(str(path), env, dtype=torch.float32, trainable=False)
        tokenizer = load_tokenizer(str(path))
        data, _ = load_pairs(
            pairs, tokenizer, max_tokens=max_tokens, for_scoring=False, overlong="truncate"
        )
        of_model = dpo.model_key(model, dtype, "cpu")
        return dpo.reference_key(of_model, data, list(range(wanted)))

    first = key()
    assert key() == first
    keys = [first, key(max_tokens=24), key(wanted=6), key(dtype="bfloat16")]
    for name, value in (("rms_norm_eps", 1e-4), ("rope_theta", 5e4)):
        config = json.loads((path / "config.json").read_text())
        if "rope_parameters" in config and name == "rope_theta":
            config["rope_parameters"]["rope_theta"] = value
        else:
            config[name] = value
        (path / "config.json").write_text(json.dumps(config))
        keys.append(key())
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-6
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    keys.append(key())
    tokenizer_file = path / "tokenizer_config.json"
    (path / "chat_template.jinja").write_text("Q: " + CHAT_TEMPLATE)
    assert tokenizer_file.is_file()
    keys.append(key())
    write_pairs(tmp_path, num_rows=22)
    keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.timeout(300)
def test_wrong_reference_logprobs_are_noticed(tmp_path: Path) -> None:
    """Whatever is wrong with them, a few are computed again before the first step."""
    flags = [*pair_flags(tmp_path), "--num_steps", 1]
    train(flags, tmp_path / "a")
    for folder in (tmp_path / "cache").iterdir():
        arrays = load_arrays(folder)
        if arrays and "logprobs" in arrays[0]:
            values = arrays[0]["logprobs"][::-1].copy()  # of other rows
            shutil.rmtree(folder)
            save_arrays(folder, {"logprobs": values}, {})
    answer = launch("dpo.py", *flags, "--output_dir", tmp_path / "b")
    assert answer.returncode != 0 and "self-test failed" in answer.stderr


@pytest.mark.timeout(300)
def test_reference_that_does_not_fit(tmp_path: Path) -> None:
    """It ended in an IndexError or in nonsense, and was deleted if the overwritten run held it."""
    flags = pair_flags(tmp_path)
    small = make_tiny_model(tmp_path / "small", flavour="no_template", vocab_size=100)
    out = tmp_path / "out"
    answer = launch("dpo.py", *flags, "--output_dir", out, "--ref_model", small)
    assert answer.returncode != 0 and f"--ref_model={small}: the tokenizer makes" in answer.stderr
    toy = make_tiny_model(tmp_path / "toy", tokenizer=make_toy_tokenizer())
    answer = launch("dpo.py", *flags, "--output_dir", out, "--ref_model", toy)
    assert answer.returncode != 0 and f"--ref_model={toy}: its tokenizer gives" in answer.stderr
    make_tiny_model(out / "final", flavour="no_template")
    more = ["--overwrite", "True", "--ref_model", out / "final"]
    answer = launch("dpo.py", *flags, "--output_dir", out, *more)
    assert answer.returncode != 0 and "would overwrite" in answer.stderr
    assert (out / "final" / "config.json").is_file()


@pytest.mark.timeout(300)
def test_another_reference_than_the_starting_model(tmp_path: Path) -> None:
    flags = pair_flags(tmp_path)
    reference = make_tiny_model(tmp_path / "ref", seed=1, flavour="no_template")
    more = ["--ref_model", reference, "--num_steps", 1]
    cached, said = train(flags, tmp_path / "cached", *more)
    live, _ = train(flags, tmp_path / "live", *more, "--reference", "live")
    assert said.count("log-probs are reproduced") == 2
    assert abs(cached[0]["eval/loss"] - math.log(2)) > 1e-3
    for ours, theirs in zip(cached, live, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.timeout(300)
def test_simpo_needs_no_reference(tmp_path: Path) -> None:
    """Its loss is a function of mean log-probs alone."""
    flags = [*pair_flags(tmp_path), "--loss", "simpo", "--beta", 2.0, "--simpo_gamma", 0.4]
    rows, said = train(flags, tmp_path / "out", "--num_steps", 1)
    assert "reference log-probs" not in said and "self-test" not in said
    assert "policy/chosen_kl" not in rows[1]
    assert rows[0]["eval/chosen_reward"] < 0 and rows[0]["eval/ties"] < 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--label_smoothing", "0.5"], "label_smoothing=0.5"),
        (["--loss", "ipo", "--label_smoothing", "0.1"], "--loss=ipo has no smoothing"),
        (["--beta", "0"], "--beta=0"),
        (["--sft_coef", "-1"], "--sft_coef=-1"),
        (["--loss", "simpo", "--ref_model", "x"], "uses no reference"),
        (["--max_tokens_per_microbatch", "4000"], "both sides of a pair"),
    ],
)
def test_mistakes_are_told_at_once(flags: list[str], message: str) -> None:
    names = [name.removeprefix("--") for name in flags[::2]]
    settings = dict(zip(names, map(as_value, flags[1::2]), strict=True))
    with pytest.raises(ValueError, match=message):
        dpo.Args(model="m", output_dir="o", dataset=("d",), **settings)  # pyright: ignore


def as_value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def test_log_ratios_by_side_and_by_token() -> None:
    row = dpo.pack(
        [0, 1, 2, 3],
        [[1, 2, 3], [1, 4], [5, 6], [5, 7, 8, 9]],
        [[False, True, True], [False, True], [False, True], [False, True, True, True]],
        shared=[0, 0, 0, 0],
    )
    values = torch.where(row.response_mask, torch.arange(1.0, row.num_tokens + 1), 0.0)
    chosen, rejected = dpo.log_ratios(row, values, means=False)
    assert (chosen.tolist(), rejected.tolist()) == ([1 + 2, 6], [4, 8 + 9 + 10])
    chosen, rejected = dpo.log_ratios(row, values, means=True)
    assert (chosen.tolist(), rejected.tolist()) == ([1.5, 6], [4, 9])
    dummy = dpo.pack([], [], [])
    chosen, _ = dpo.log_ratios(dummy, torch.zeros(2, requires_grad=True), means=True)
    chosen.sum().backward()
