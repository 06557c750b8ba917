"""Rows in every accepted format become the right ids and masks, a clear error or a counted drop."""

import datetime
import json
import os
import re
import subprocess

import numpy as np
import pytest
from launch import ROOT, command, environment
from tiny import CHAT_TEMPLATE, FLAVOURS, make_tokenizer

from common import cache, data
from common.data import (
    TokenRow,
    load_prompts,
    load_sft_rows,
    render_example,
    stop_token_ids,
)

USER = {"role": "user", "content": "hi"}
CHAT = [USER, {"role": "assistant", "content": "hello"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def prompts(tmp_path, rows, tokenizer=None, **options):
    paths = write(tmp_path / "rows.jsonl", rows)
    options = {"max_prompt_tokens": 200} | options
    kept, report = load_prompts(paths, tokenizer or make_tokenizer(), **options)
    return kept, report.dropped


def sft(tmp_path, rows, tokenizer=None, **options):
    paths = write(tmp_path / "rows.jsonl", rows)
    dataset, report = load(paths, tokenizer, **options)
    return list(dataset), report.dropped


def load(paths, tokenizer=None, **options):
    return load_sft_rows(paths, tokenizer or make_tokenizer(), **({"max_tokens": 200} | options))


def trained(row, tokenizer):
    """Decoded targets, a | between separate stretches."""
    shown = render_example(row, tokenizer, max_chars=10_000)
    return "|".join(part.partition("»")[0] for part in shown.split("«")[1:])


# ---- prompts ----


def test_parquet_becomes_plain_lists(tmp_path):
    """verl's parquet files hold prompts as arrays of structs; rewards and templates want lists."""
    pandas = pytest.importorskip("pandas")
    row = {
        "data_source": "gsm8k",
        "prompt": np.array([{"role": "user", "content": "1+1?"}], dtype=object),
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0},
        "tags": np.array(["x", "y"], dtype=object),
    }
    pandas.DataFrame([row]).to_parquet(tmp_path / "train.parquet")
    loaded, report = load_prompts(
        [str(tmp_path / "train.parquet")], make_tokenizer(), max_prompt_tokens=64
    )
    assert report.dropped == {}
    assert loaded[0].prompt == [{"role": "user", "content": "1+1?"}]
    assert loaded[0].columns == {
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0},
        "tags": ["x", "y"],
        "ground_truth": "2",
    }
    assert type(loaded[0].columns["tags"]) is list


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_one_bos_whatever_the_format(tmp_path, flavour):
    """P01: template text with a BOS was tokenised with special tokens on: two BOS."""
    tokenizer = make_tokenizer(flavour)
    bos = tokenizer.bos_token_id
    rows = [{"prompt": "hi"}, {"prompt": "<bos>hi"}, {"question": "hi", "answer": "x"}]
    for row in prompts(tmp_path, rows, tokenizer, prompt_format="text")[0]:
        assert row.prompt_ids == [bos, *tokenizer("hi", add_special_tokens=False)["input_ids"]]
    if flavour == "no_template":
        plain = prompts(tmp_path, rows[:1], tokenizer)[0][0]
        assert plain.prompt_ids == tokenizer("hi")["input_ids"]
        with pytest.raises(ValueError, match="no chat template"):
            prompts(tmp_path, [{"prompt": [USER]}], tokenizer)
        with pytest.raises(ValueError, match="--prompt_format=chat"):
            prompts(tmp_path, rows, tokenizer, prompt_format="chat")
        with pytest.raises(ValueError, match="--system_prompt"):
            prompts(tmp_path, rows, tokenizer, system_prompt="be brief")
        return
    expected = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    for row in prompts(tmp_path, [{"prompt": "hi"}, {"prompt": [USER]}], tokenizer)[0]:
        assert row.prompt_ids == expected and expected.count(bos) == 1
    # the same prompt in SFT data gives the same ids
    row = sft(tmp_path, [{"messages": CHAT}], tokenizer)[0][0]
    assert row.input_ids[: len(expected)] == expected and row.input_ids.count(bos) == 1


def test_no_eos_behind_a_prompt(tmp_path):
    """A post-processor closed every prompt with EOS: the model was to go on after the end."""
    tokenizer = make_tokenizer("no_template", add_eos=True)
    assert tokenizer("hi")["input_ids"][-1] == tokenizer.eos_token_id
    row = prompts(tmp_path, [{"prompt": "hi"}], tokenizer)[0][0]
    assert row.prompt_ids == tokenizer("hi")["input_ids"][:-1]


def test_columns_are_handed_over(tmp_path):
    rows = [
        {"prompt": "a", "gold": {"x": [1, None]}, "answer": None},
        {"question": "b", "answer": "2 + 2 = 4\n#### 4", "id": 7},
        {"prompt": [USER], "data_source": "d", "reward_model": {"ground_truth": "9"}},
    ]
    first, second, third = prompts(tmp_path, rows)[0]
    assert (first.prompt, first.columns) == ("a", {"gold": {"x": [1, None]}, "answer": None})
    assert (second.prompt, second.columns) == ("b", {"answer": "2 + 2 = 4\n#### 4", "id": 7})
    assert third.prompt == [USER]
    assert third.columns == {
        "data_source": "d",
        "reward_model": {"ground_truth": "9"},
        "ground_truth": "9",
    }


def test_drops_are_counted_and_nothing_is_truncated(tmp_path):
    """P10: a prompt beyond the limit crashed the engine or silently lost its beginning."""
    rows = [
        {"prompt": "short"},
        {"prompt": "long " * 50},
        {"prompt": "  \n"},
        {"prompt": None},
        {"prompt": []},
        {"prompt": CHAT},
        {"prompt": "x", "tools": "[{"},
        {"prompt": [USER, {"role": "tol", "content": "x"}]},
    ]
    kept, drops = prompts(tmp_path, rows, max_prompt_tokens=32)
    assert [row.prompt for row in kept] == ["short"]
    assert drops == {
        "too_long": 1,
        "empty_prompt": 3,
        "prompt_ends_with_assistant": 1,
        "bad_tools": 1,
        "unknown_role": 1,
    }
    limit = len(kept[0].prompt_ids)
    assert len(prompts(tmp_path, rows[:1], max_prompt_tokens=limit)[0]) == 1
    with pytest.raises(ValueError, match=r"--dataset: all 2 rows .*too_long.*max_prompt_tokens=3"):
        prompts(tmp_path, rows[:2], max_prompt_tokens=3)


def test_system_prompt_is_neither_lost_nor_doubled(tmp_path):
    tokenizer = make_tokenizer()
    own = {"role": "system", "content": "own"}
    rows = [{"prompt": "hi"}, {"prompt": [USER]}, {"prompt": [own, USER]}]
    loaded = prompts(tmp_path, rows, tokenizer, system_prompt="given")[0]
    texts = [tokenizer.decode(row.prompt_ids) for row in loaded]
    assert texts[0] == texts[1] and texts[0].count("system") == texts[0].count("given") == 1
    assert texts[2].count("system") == texts[2].count("own") == 1 and "given" not in texts[2]
    assert [row.prompt for row in loaded] == ["hi", [USER], [own, USER]]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"problem": "x", "level": 1}, {}, r"row 1 of .*\['level', 'problem'\].*question\+answer"),
        ({"prompt": 5}, {}, r"row 1 of rows\.jsonl: prompt: expected text or a list"),
        ({"prompt": ["hi"]}, {}, "expected a list of {role, content} messages, found \\['hi'\\]"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "must be text"),
        ({"prompt": [USER, USER]}, {"prompt_format": "text"}, "a single user turn"),
        ({"prompt": "x"}, {"prompt_format": "jinja"}, "--prompt_format=jinja"),
    ],
)
def test_bad_prompts(tmp_path, row, options, message):
    with pytest.raises(ValueError, match=message):
        prompts(tmp_path, [row], **options)


def test_template_that_refuses_a_row(tmp_path):
    template = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}x"
    tokenizer = make_tokenizer(chat_template=template)
    kept, drops = prompts(tmp_path, [{"prompt": "a"}, {"prompt": [USER, USER]}], tokenizer)
    assert len(kept) == 1 and drops == {"template_error": 1}
    with pytest.raises(ValueError, match="template_error.*one turn only"):
        prompts(tmp_path, [{"prompt": [USER, USER]}], tokenizer)


# ---- SFT ----


@pytest.mark.parametrize("flavour", FLAVOURS[:3])
def test_targets_end_with_the_stop_token(tmp_path, flavour):
    """P03, P04: the turn's end was outside the mask, or masked because pad and EOS share an id."""
    tokenizer = make_tokenizer(flavour)
    stop = stop_token_ids(tokenizer)
    assert stop == sorted(tokenizer.convert_tokens_to_ids(["<eos>", "<|im_end|>"]))
    row = sft(tmp_path, [{"messages": [*CHAT, USER, *CHAT[1:]]}], tokenizer)[0][0]
    assert trained(row, tokenizer) == "hello<|im_end|>|hello<|im_end|>"
    text = tokenizer.decode(row.input_ids)
    assert text == tokenizer.apply_chat_template([*CHAT, USER, *CHAT[1:]], tokenize=False)


def test_formats_give_the_same_row(tmp_path):
    tokenizer = make_tokenizer()
    rows = [
        {"messages": CHAT},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "hi", "input": "", "output": "hello"},
        {"question": "hi", "answer": "hello"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        # a columnar file fills absent keys with null
        {"messages": [m | {"tool_calls": None, "name": None} for m in CHAT], "tools": None},
    ]
    loaded, drops = sft(tmp_path, rows, tokenizer)
    assert drops == {} and all(row == loaded[0] for row in loaded)
    row = sft(tmp_path, [{"instruction": "a", "input": "b", "output": "c"}], tokenizer)[0][0]
    assert "user\na\n\nb<|im_end|>" in tokenizer.decode(row.input_ids)


def test_prompt_completion_trains_the_completion_only(tmp_path):
    """P12: earlier assistant turns of a conversational prompt are context."""
    tokenizer = make_tokenizer()
    row = {"prompt": [*CHAT, USER], "completion": [{"role": "assistant", "content": "bye"}]}
    assert trained(sft(tmp_path, [row], tokenizer)[0][0], tokenizer) == "bye<|im_end|>"


@pytest.mark.parametrize("add_eos", [False, True])
def test_plain_text_gets_one_eos(tmp_path, add_eos):
    """P02: EOS appended twice, once by the tokenizer's post-processor or the data itself."""
    tokenizer = make_tokenizer("no_template", add_eos=add_eos)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows = [
        {"prompt": "hi", "completion": "hello"},
        {"prompt": "hi", "completion": "hello<eos>"},
        {"text": "hello"},
        {"text": "<bos>hello<eos>"},
    ]
    first, second, third, fourth = sft(tmp_path, rows, tokenizer)[0]
    assert first == second and third == fourth
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert third == TokenRow([bos, *hello, eos], [False, True, True])
    assert trained(first, tokenizer) == "hello<eos>"
    assert first.input_ids.count(bos) == first.input_ids.count(eos) == 1
    # messages of one exchange as plain text
    paths = [{"messages": CHAT}, {"prompt": CHAT[:1], "completion": CHAT[1:]}]
    assert sft(tmp_path, paths, make_tokenizer(), prompt_format="text")[0] == [first, first]


def test_merge_across_the_prompt_boundary(tmp_path):
    """P07: "7=" + "12" has a token "=1"; a rollout starts behind "=", so training must as well."""
    tokenizer = make_tokenizer("no_template")
    prompt_ids = prompts(tmp_path, [{"prompt": "7="}], tokenizer)[0][0].prompt_ids
    joined = tokenizer("7=12")["input_ids"]
    assert joined[: len(prompt_ids)] != prompt_ids
    row = sft(tmp_path, [{"prompt": "7=", "completion": "12"}], tokenizer)[0][0]
    assert row.input_ids[: len(prompt_ids)] == prompt_ids
    assert trained(row, tokenizer) == "12<eos>"


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_template_that_rewrites_history(tmp_path):
    """P07: a turn was trained without the reasoning that its own context would have it write."""
    tokenizer = make_tokenizer(chat_template=THINKING)
    answer = {"role": "assistant", "content": "<think>so</think>yes"}
    paths = write(tmp_path / "rows.jsonl", [{"messages": [USER, answer, USER, answer]}])
    dataset, report = load(paths, tokenizer)
    assert report.dropped == {} and report.split_rows == 1
    first, second = [trained(row, tokenizer) for row in dataset]
    assert first == second == "<think>so</think>yes<|im_end|>"
    assert tokenizer.decode(dataset[1].input_ids).count("so") == 1
    dataset, report = load(paths, tokenizer, train_on="last_turn")
    assert len(dataset) == 1 and report.split_rows == 0


def test_generation_prompt_that_is_not_a_prefix_is_dropped(tmp_path):
    cue = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    template = THINKING.replace(THINKING[THINKING.index("{% if add_gen") :], cue)
    tokenizer = make_tokenizer(chat_template=template)
    thinking = [USER, {"role": "assistant", "content": "<think>so</think>yes"}]
    kept, drops = sft(tmp_path, [{"messages": thinking}, {"messages": CHAT}], tokenizer)
    assert trained(kept[0], tokenizer) == "so</think>yes<|im_end|>"
    assert drops == {"template_prefix": 1}


def test_text_after_the_stop_token_is_not_a_target(tmp_path):
    """Templates of Phi's kind close the whole chat with EOS behind the turn's own stop token."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer = make_tokenizer(chat_template=template)
    row = sft(tmp_path, [{"messages": [*CHAT, *CHAT]}], tokenizer)[0][0]
    assert trained(row, tokenizer) == "hello<|im_end|>|hello<|im_end|>"
    assert tokenizer.decode(row.input_ids).endswith("<|im_end|>\n<eos>")


def test_template_without_stop_token_is_refused(tmp_path):
    """P04: the terminator is the start of the next message, so no turn would learn to stop."""
    template = (
        "{% for m in messages %}{% if not loop.first %}<|im_end|>{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    with pytest.raises(ValueError, match="learn to stop"):
        sft(tmp_path, [{"messages": CHAT}], make_tokenizer(chat_template=template))


def test_sft_drops_are_counted(tmp_path):
    """P05: rows without a single target trained on nothing, silently."""
    rows = [
        {"messages": CHAT},
        {"messages": [USER]},
        {"messages": []},
        {"prompt": "hi", "completion": ""},
        {"messages": [USER, {"role": "assistant", "content": "x" * 100}]},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
        {"messages": CHAT, "tools": [{"name": "f"}]},
        {"conversations": [{"from": "function_call", "value": "{}"}]},
        {"conversations": [{"from": "gpt", "value": "hello"}]},
    ]
    kept, drops = sft(tmp_path, rows, max_tokens=64)
    assert len(kept) == 1
    assert drops == {
        "no_target": 3,
        "too_long": 2,  # the second with its tools
        "bad_tool_call": 2,
        "starts_with_assistant": 1,
    }
    with pytest.raises(ValueError, match=r"the only row .*no_target.*to train\)$"):
        sft(tmp_path, rows[1:2])


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"question": "x", "reply": "y"}, {}, r"\['question', 'reply'\].*instruction"),
        ({"prompt": "x", "completion": CHAT[1:]}, {}, "both be text or both be messages"),
        ({"messages": [*CHAT, *CHAT]}, {"prompt_format": "text"}, "a single user turn"),
        ({"text": "x"}, {"system_prompt": "be brief"}, "--system_prompt"),
    ],
)
def test_bad_sft_rows(tmp_path, row, options, message):
    with pytest.raises(ValueError, match=message):
        sft(tmp_path, [row], **options)


def test_stop_tokens_are_the_union():
    class Config:
        eos_token_id = [9, 1]

    tokenizer = make_tokenizer()
    assert stop_token_ids(tokenizer, Config()) == [1, 4, 9]
    Config.eos_token_id = 7
    assert stop_token_ids(tokenizer, Config()) == [1, 4, 7]
    Config.eos_token_id = None
    assert stop_token_ids(make_tokenizer("no_template"), Config()) == [1]


def test_stop_token_of_templates_with_special_tokens_inside_the_turn():
    """A special token between header and text is no stop token, though it follows the cue."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}<pad>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    assert stop_token_ids(make_tokenizer(chat_template=template)) == [1, 4]


def test_render_example_marks_and_shortens(tmp_path):
    tokenizer = make_tokenizer("no_template")
    row = sft(tmp_path, [{"prompt": "p" * 90, "completion": "yes"}], tokenizer)[0][0]
    shown = render_example(row, tokenizer, max_chars=20)
    assert shown.endswith("pppppppppp«yes<eos>»") and "75 characters" in shown and len(shown) < 80
    prompt = prompts(tmp_path, [{"prompt": "hi"}], tokenizer)[0][0]
    assert render_example(prompt, tokenizer) == "<bos>hi"
    assert render_example(TokenRow([], []), tokenizer) == ""


# ---- formats ----

SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": CHAT}, "messages"),
        ({"messages": SHAREGPT}, "messages"),
        ({"conversations": CHAT, "system": None, "tools": ""}, "conversations"),
        ({"conversations": SHAREGPT, "tools": "[]"}, "conversations"),
        (
            {"instruction": "hi", "input": None, "output": "hello", "text": "x"},
            "instruction+output",
        ),
        ({"question": "hi", "answer": "hello"}, "question+answer"),
        ({"prompt": "hi", "completion": "hello", "messages": None}, "prompt+completion"),
        ({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1]}, "conversations+chosen"),
        ({"conversations": SHAREGPT[:1], "chosen": CHAT[1]}, "conversations+chosen"),
        ({"prompt": "hi", "chosen": "hello", "rejected": "no"}, "prompt+chosen"),
        ({"prompt": CHAT[:1], "chosen": "hello"}, "prompt+chosen"),
        ({"prompt": "hi", "chosen": CHAT}, "prompt+chosen"),
        ({"prompt": CHAT[:1], "chosen": CHAT}, "prompt+chosen"),
        ({"prompt": CHAT[:1], "chosen": CHAT[1:]}, "prompt+chosen"),
        ({"question": "hi", "system": "", "chosen": "hello", "rejected": "no"}, "question+chosen"),
        ({"question": "hi", "chosen": CHAT, "rejected": CHAT}, "question+chosen"),
        ({"instruction": "", "input": "hi", "chosen": "hello"}, "instruction+chosen"),
        ({"chosen": CHAT, "rejected": [USER, {"role": "assistant", "content": "no"}]}, "chosen"),
        ({"chosen": CHAT}, "chosen"),
    ],
)
def test_every_format_gives_the_same_row(tmp_path, row, name):
    tokenizer = make_tokenizer()
    expected = sft(tmp_path, [{"messages": CHAT}], tokenizer)[0]
    dataset, report = load(write(tmp_path / "a.jsonl", [row]), tokenizer)
    assert list(dataset) == expected
    assert report.formats == {name: 1} and not report.dropped


def test_preference_rows_train_what_was_chosen_last(tmp_path):
    """P12: of the conversation before it, no assistant turn is trained."""
    tokenizer = make_tokenizer()
    bye, other = ({"role": "assistant", "content": text} for text in ("bye", "no"))
    for row in (
        {"prompt": [*CHAT, USER], "chosen": [*CHAT, USER, bye], "rejected": [*CHAT, USER, other]},
        {"chosen": [*CHAT, USER, bye], "rejected": [*CHAT, USER, other]},
        {"chosen": [*CHAT, USER, bye]},
        {"conversations": [*CHAT, USER], "chosen": bye},
        {"prompt": [*CHAT, USER], "chosen": [{"role": "system", "content": "s"}, *CHAT, USER, bye]},
        {"prompt": [{"role": "system", "content": "s"}, *CHAT, USER], "chosen": [*CHAT, USER, bye]},
    ):
        assert trained(sft(tmp_path, [row], tokenizer)[0][0], tokenizer) == "bye<|im_end|>"


def test_history_and_system_columns(tmp_path):
    tokenizer = make_tokenizer()
    row = {"instruction": "b", "output": "c", "system": "s", "history": [["hi", "hello"]]}
    loaded = sft(tmp_path, [row, {"conversations": SHAREGPT, "system": "s"}], tokenizer)[0]
    assert trained(loaded[0], tokenizer) == "c<|im_end|>"
    text = tokenizer.decode(loaded[0].input_ids)
    assert text.startswith("<bos><|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert "system\ns<|im_end|>" in tokenizer.decode(loaded[1].input_ids)


def test_function_calls_of_sharegpt_rows(tmp_path):
    tokenizer = make_tokenizer()
    calls = [{"name": "f", "arguments": {"x": i}} for i in range(3)]
    turns = [
        *SHAREGPT[:1],
        {"from": "gpt", "value": "Wait."},
        {"from": "function_call", "value": json.dumps(calls[0])},
        {"from": "function_call", "value": json.dumps(calls[1:])},
        {"from": "observation", "value": "7"},
        *SHAREGPT[1:],
    ]
    paths = write(tmp_path / "a.jsonl", [{"conversations": turns, "tools": '[{"name": "f"}]'}])
    dataset, report = load(paths, tokenizer, max_tokens=2000)
    called = "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    assert trained(dataset[0], tokenizer) == f"Wait.{called}<|im_end|>|hello<|im_end|>"
    text = tokenizer.decode(dataset[0].input_ids)
    assert '<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>' in text
    assert len(report.notes) == 2 and "hermes" in str(report)


def test_prompts_of_preference_rows(tmp_path):
    """Held-out pairs are the prompts of an online evaluation."""
    answer = {"from": "gpt", "value": "12"}
    turns = [{"from": "human", "value": "hello"}]
    rows = [
        {"conversations": turns, "chosen": answer, "rejected": answer | {"value": "1"}},
        {"prompt": "hello", "chosen": "12", "rejected": "1"},
        {"question": "hello", "chosen": "12", "rejected": "1", "answer": "12"},
        {"instruction": "hello", "input": "", "chosen": "12", "rejected": "1", "prompt": None},
        {"chosen": "Human: hello", "rejected": "Human: hell"},
    ]
    kept, dropped = prompts(tmp_path, rows)
    assert kept[0].prompt == [{"role": "user", "content": "hello"}]
    assert [row.prompt_ids for row in kept] == [kept[0].prompt_ids] * 4
    assert dropped == {"no_prompt_column": 1}
    history = {"instruction": "b", "history": [["hello", "12"]], "system": "s"}
    (row,), _ = prompts(tmp_path, [history | {"chosen": "1", "rejected": "2"}])
    assert [m["content"] for m in row.prompt] == ["s", "hello", "12", "b"]
    with pytest.raises(ValueError, match="row 1 of rows.jsonl: input: would be lost"):
        prompts(tmp_path, [{"input": "hello", "chosen": "a b", "rejected": "a c"}])


def test_prompts_render_tools_and_know_their_source(tmp_path):
    tools = [{"name": "f", "arguments": None}]
    one = write(tmp_path / "one.jsonl", [{"prompt": "hi"}])
    two = write(tmp_path / "two.jsonl", [{"prompt": "hi", "tools": tools}])
    tokenizer = make_tokenizer()
    rows, report = load_prompts(one + two, tokenizer, max_prompt_tokens=999)
    assert [row.source for row in rows] == [0, 1]
    text = tokenizer.decode(rows[1].prompt_ids)
    assert '{"type": "function", "function": {"name": "f"}}' in text
    assert text.endswith("<|im_start|>assistant\n") and report.sequences == 2 and report.notes
    template = "{{ extra }}<|im_start|>"
    (row,), _ = load_prompts(
        one,
        make_tokenizer(chat_template=template),
        max_prompt_tokens=9,
        template_kwargs={"extra": "hello"},
    )
    assert tokenizer.decode(row.prompt_ids) == "hello<|im_start|>"


# ---- what is trained, limits, report ----


def test_train_on(tmp_path):
    """P12: which assistant turns are trained is one explicit setting."""
    tokenizer = make_tokenizer()
    bye = {"role": "assistant", "content": "bye"}
    rows = [
        {"messages": [*CHAT, USER, bye]},
        {"prompt": CHAT[:1], "completion": [CHAT[1], USER, bye]},
        {"prompt": "hi", "completion": "bye"},
        {"text": "hello"},
        {"messages": [*CHAT, USER]},
    ]
    paths = write(tmp_path / "a.jsonl", rows)
    found = {
        train_on: [trained(row, tokenizer) for row in load(paths, tokenizer, train_on=train_on)[0]]
        for train_on in ("all_turns", "last_turn", "full")
    }
    hello, both = "hello<|im_end|>", "hello<|im_end|>|bye<|im_end|>"
    assert found["all_turns"] == [both, both, "bye<|im_end|>", "hello<eos>", hello]
    assert found["last_turn"] == ["bye<|im_end|>"] * 3 + ["hello<eos>", hello]
    for row in load(paths, tokenizer, train_on="full")[0]:
        assert row.loss_mask == [False] + [True] * (len(row.input_ids) - 1)
    plain = write(tmp_path / "b.jsonl", rows[2:3])
    row = load(plain, make_tokenizer("no_template"), train_on="full")[0][0]
    assert row.loss_mask == [False] + [True] * (len(row.input_ids) - 1)
    with pytest.raises(ValueError, match="--train_on=first: expected all_turns, last_turn or full"):
        load(paths, tokenizer, train_on="first")


def test_truncation_cuts_the_tail_once(tmp_path):
    """P19: an overflow came back as a sample of its own, without its beginning."""
    tokenizer = make_tokenizer()
    long = [USER, {"role": "assistant", "content": "x" * 50}]
    late = [{"role": "user", "content": "x" * 50}, CHAT[1]]
    paths = write(tmp_path / "a.jsonl", [{"messages": m} for m in (CHAT, long, late)])
    whole, _ = load(paths, tokenizer)
    kept, report = load(paths, tokenizer, max_tokens=40, overlong="truncate")
    assert kept[0] == whole[0] and len(kept) == 2 and report.truncated == 1
    assert kept[1].input_ids == whole[1].input_ids[:40]
    assert kept[1].loss_mask == whole[1].loss_mask[:40]
    assert report.dropped == {"too_long": 1} and "no target among the first 40" in str(report)
    kept, report = load(paths, tokenizer, max_tokens=40)
    assert kept[:] == whole[:1] and report.dropped == {"too_long": 2} and not report.truncated
    with pytest.raises(ValueError, match="--overlong=split: expected drop or truncate"):
        load(paths, tokenizer, overlong="split")


def test_dataset_is_a_sequence_of_rows(tmp_path):
    tokenizer = make_tokenizer()
    one = write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"text": "hello"}])
    two = write(tmp_path / "b.jsonl", [{"text": "12"}] * 3)
    dataset, report = load([*one, *two], tokenizer)
    rows = list(dataset)
    assert rows == dataset[:] and rows[1:3] == dataset[1:3] and rows[-1] == dataset[-1]
    assert type(rows[0].input_ids[0]) is int and type(rows[0].loss_mask[0]) is bool
    assert dataset.lengths.tolist() == [len(row.input_ids) for row in rows]
    assert dataset.num_targets.tolist() == [sum(row.loss_mask) for row in rows]
    assert dataset.largest_id == max(max(row.input_ids) for row in rows)
    assert dataset.source_sizes == [2, 3]
    assert (dataset.input_ids.dtype, dataset.loss_mask.dtype) == (np.int32, np.bool_)
    assert report.tokens == dataset.lengths.sum()
    assert report.target_tokens == dataset.num_targets.sum()
    with pytest.raises(IndexError):
        dataset[5]
    # the first few only, from as many sources as it takes
    for limit in range(1, 7):  # about as many from each name, in order
        some, report = load([*one, *two], tokenizer, limit=limit, cache_dir=tmp_path / "cache")
        sizes = [min((limit + 1) // 2, 2), min(limit // 2, 3)]
        assert some[:] == [*rows[: sizes[0]], *rows[2 : 2 + sizes[1]]]
        assert some.source_sizes == sizes and report.sequences == sum(sizes)
        assert "the first" in str(report) and report.from_cache is None
    assert not (tmp_path / "cache").exists()


def test_report_says_what_happened_to_which_row(tmp_path):
    rows = [
        {"messages": CHAT},
        {"text": "x" * 999},
        {"messages": [USER, {"role": "asistant", "content": "x"}]},
        {"messages": [USER, {"role": "bot", "content": "x"}]},
    ]
    dataset, report = load(write(tmp_path / "a.jsonl", rows))
    assert report.dropped == {"too_long": 1, "unknown_role": 2}
    assert report.examples["unknown_role"] == "row 3 of a.jsonl: message 2: role 'asistant'"
    lines = str(report).splitlines()
    tokens = len(dataset[0].input_ids)
    assert lines[0] == (
        f"--dataset: 4 rows (messages 3, text 1) -> 1 sequence, {tokens} tokens, "
        f"2 trained ({2 / tokens:.1%})"
    )
    assert "  dropped 2: unknown_role (row 3 of a.jsonl: message 2: role 'asistant')" in lines


def test_example_in_color(tmp_path):
    tokenizer = make_tokenizer()
    shown = render_example(sft(tmp_path, [{"messages": CHAT}])[0][0], tokenizer, color=True)
    assert "assistant\n\x1b[32mhello<|im_end|>\x1b[0m\n" in shown


def test_worker_processes_give_the_same_in_the_same_order(tmp_path, monkeypatch):
    rows = [{"messages": [USER, {"role": "assistant", "content": f"{i}"}]} for i in range(2300)]
    rows[1500] = {"text": "x" * 300}
    nested: object = []
    for _ in range(900):  # more than can be pickled, in a column that nobody reads
        nested = [nested]
    rows[700]["extra"] = nested
    paths = write(tmp_path / "a.jsonl", rows)
    alone, report = load(paths)
    monkeypatch.setattr(data, "PARALLEL_ROWS", 2000)
    monkeypatch.setattr(data, "_num_cores", lambda: 2)
    together, same = load(paths)
    assert np.array_equal(alone.input_ids, together.input_ids)
    assert np.array_equal(alone.loss_mask, together.loss_mask)
    assert np.array_equal(alone.offsets, together.offsets) and report == same
    assert same.examples == {"too_long": "row 1501 of a.jsonl: 302 tokens"}
    rows[2100] = {"question": "x"}
    with pytest.raises(ValueError, match="row 2101 of a.jsonl: unknown format"):
        load(write(tmp_path / "a.jsonl", rows))


# ---- bad input ----

ANSWER = {"role": "assistant", "content": "yes"}


def calling(call):
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "no_target"),
        ({"messages": []}, "no_target"),
        ({"messages": [USER]}, "no_target"),
        ({"text": ""}, "no_target"),
        ({"prompt": "", "completion": None}, "no_target"),
        ({"prompt": "x", "completion": " \n"}, "no_target"),
        ({"prompt": CHAT, "completion": [USER]}, "no_target"),
        ({"question": "x", "answer": None}, "no_target"),
        ({"prompt": "x", "chosen": []}, "no_target"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "empty_turn"),
        ({"messages": [USER, {"role": "assistant", "content": "  "}]}, "empty_turn"),
        ({"messages": [{"role": "user", "content": ""}, ANSWER]}, "empty_turn"),
        ({"messages": [{"role": "user"}, ANSWER]}, "empty_turn"),
        ({"messages": [USER, {"role": "asistant", "content": "x"}]}, "unknown_role: .*asistant"),
        ({"messages": [USER, {"content": "x"}]}, "unknown_role: .*message 2: no role"),
        ({"messages": [USER, {"role": 7, "content": "x"}]}, "unknown_role: .*role 7"),
        ({"messages": [{}]}, "unknown_role: .*no role"),
        ({"messages": [ANSWER, USER]}, "starts_with_assistant"),
        ({"prompt": "", "chosen": [ANSWER]}, "starts_with_assistant"),
        ({"messages": [{"role": "user", "content": 5}, ANSWER]}, "not_text: .*found 5"),
        ({"messages": [{"role": "user", "content": {"a": 1}}, ANSWER]}, "not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "not_text"),
        ({"messages": [USER, ANSWER | {"reasoning_content": 5}]}, "not_text: .*reasoning"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "invalid_unicode"),
        ({"messages": [{"role": "user", "content": "é\udfff"}, ANSWER]}, "invalid_unicode"),
        ({"text": "a\ud83d"}, "invalid_unicode"),
        ({"messages": [USER, {"role": "assistant", "content": "<eos>"}]}, "special_token_in_text"),
        ({"messages": CHAT, "tools": "[{"}, "bad_tools: .*invalid JSON"),
        ({"messages": CHAT, "tools": [{"description": "x"}]}, "bad_tools: .*without a name"),
        ({"messages": CHAT, "tools": [5]}, "bad_tools: .*without a name: 5"),
        ({"messages": CHAT, "tools": "7"}, "bad_tools"),
        ({"messages": CHAT, "tools": "[" * 100_000}, "bad_tools: .*recursion"),
        (calling(json.loads('{"a":' * 900 + "{}" + "}" * 900)), "nested_too_deep"),
        (calling({"function": {"arguments": "{}"}}), "bad_tool_call: .*without a name"),
        (calling({"function": {"name": "f", "arguments": "{"}}), "bad_tool_call: .*invalid JSON"),
        (calling({"function": {"name": "f", "arguments": "[1]"}}), "bad_tool_call: .*no object"),
        (calling(None), "bad_tool_call"),
        (
            {"conversations": [*SHAREGPT, {"from": "function_call", "value": "f(x)"}]},
            "bad_tool_call: .*message 3: invalid JSON",
        ),
        ({"conversations": [{"role": "system", "content": "a"}], "system": "b"}, "two_system"),
        ({"messages": [USER, {"role": "assistant", "content": "x" * 999}]}, "too_long: .* tokens"),
    ],
)
def test_rows_that_cannot_be_used_are_counted_and_described(tmp_path, row, reason):
    """Each came up in real data, and crashed later or trained on something else."""
    reason, _, detail = reason.partition(": ")
    paths = write(tmp_path / "a.jsonl", [{"messages": CHAT}, row, {"messages": CHAT}])
    dataset, report = load(paths)
    assert len(dataset) == 2 and dataset[0] == dataset[1]
    (found,) = report.dropped
    assert found.startswith(reason) and report.dropped[found] == 1
    assert re.search(f"row 2 of a.jsonl: .*{detail}", report.examples[found])
    with pytest.raises(ValueError, match=f"--dataset: the only row of .*: 1 {reason}.*{detail}"):
        load(write(tmp_path / "b.jsonl", [row]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "reply": "y"}, r"columns \['question', 'reply'\]; accepted: messages"),
        ({}, r"columns \[\]"),
        ({"messages": "hi"}, "messages: expected a list of .*found 'hi'"),
        ({"messages": USER}, "messages: expected a list"),
        ({"messages": ["hi", "ho"]}, r"messages: expected a list .*found \['hi', 'ho'\]"),
        ({"messages": [CHAT]}, "messages: expected a list"),
        ({"messages": True}, "messages: expected a list"),
        ({"chosen": "text"}, "chosen: expected a list"),
        ({"prompt": "x", "completion": CHAT[1:]}, "both be text or both be messages"),
        ({"prompt": 7, "completion": "x"}, "prompt: expected text or a list .*found 7"),
        ({"prompt": "x", "chosen": 7}, "chosen: expected a list"),
        ({"question": ["x"], "answer": "y"}, r"question: expected text, found \['x'\]"),
        ({"instruction": {"a": 1}, "output": "y"}, "instruction: expected text"),
        ({"instruction": "x", "output": "y", "history": ["a"]}, "history: expected a list of"),
        ({"conversations": SHAREGPT, "system": ["a"]}, "system: expected text"),
        ({"conversations": SHAREGPT, "system": True}, "system: expected text, found True"),
    ],
)
def test_columns_of_the_wrong_type_name_row_and_value(tmp_path, row, message):
    paths = write(tmp_path / "a.jsonl", [{"messages": CHAT}, row])
    with pytest.raises(ValueError, match=f"^--dataset: row 2 of a.jsonl: .*{message}"):
        load(paths)


@pytest.mark.parametrize(
    "text",
    ["\0\x01\x7f", "\u2028\u2029\x85", "\ufeff", "🧑‍🚀é\u0301", "<|im_start", "{{ x }}{% y %}"],
)
def test_odd_text_is_text(tmp_path, text):
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": text + "."}, {"role": "assistant", "content": f"a{text}b"}]
    row = sft(tmp_path, [{"messages": chat}], tokenizer)[0][0]
    assert trained(row, tokenizer) == f"a{text}b<|im_end|>"


def test_roles_that_do_not_alternate_are_the_templates_business(tmp_path):
    tokenizer = make_tokenizer()
    row = sft(tmp_path, [{"messages": [USER, USER, ANSWER, ANSWER]}], tokenizer)[0][0]
    assert trained(row, tokenizer) == "yes<|im_end|>|yes<|im_end|>"


def test_a_template_that_fails_on_most_rows_is_an_error(tmp_path):
    """One row in a thousand survived, and the run trained on it."""
    template = "{% if messages[0].content == 'a' %}{{ raise_exception('no a') }}{% endif %}"
    tokenizer = make_tokenizer(chat_template=template + CHAT_TEMPLATE)
    rows = [{"prompt": text, "completion": "b"} for text in "acaca"]
    with pytest.raises(ValueError, match=r"fails on most rows: template_error \(row 1 of .* no a"):
        sft(tmp_path, rows, tokenizer)
    assert sft(tmp_path, rows[1:], tokenizer)[1] == {"template_error": 2}


def test_a_dataset_of_which_nothing_is_left_is_an_error(tmp_path):
    good = write(tmp_path / "good.jsonl", [{"text": "x"}])
    bad = write(tmp_path / "bad.jsonl", [{"text": "x" * 999}, {"text": ""}])
    message = (
        r"--eval_dataset: all 2 rows of .*bad.jsonl were dropped: 1 too_long \(row 1 .*no_target.*"
        r"\(--max_sequence_tokens=200\)$"
    )
    with pytest.raises(ValueError, match=message):
        load(good + bad, flag="--eval_dataset")


# ---- cache ----


def cached(paths, folder, tokenizer=None, **options):
    dataset, report = load(paths, tokenizer, cache_dir=folder, **options)
    return dataset, report


def test_cache_hits_only_when_nothing_has_changed(tmp_path):
    """P09: a changed template had no effect, or every run tokenised anew."""
    rows = [{"messages": CHAT}, {"text": ""}]
    paths = write(tmp_path / "a.jsonl", rows)
    folder = tmp_path / "deep" / "cache"
    fresh, first = cached(paths, folder)
    again, second = cached(paths, folder)
    assert not first.from_cache and second.from_cache
    assert again[:] == fresh[:] and again.largest_id == fresh.largest_id
    assert isinstance(again.input_ids, np.memmap)
    assert str(folder) in str(second)
    second.from_cache = None
    assert first == second and "no_target (row 2 of a.jsonl" in str(second)
    tokenizer = make_tokenizer()
    tokenizer(["a", "b b"], padding=True, truncation=True, max_length=5)  # leaves settings behind
    assert cached(paths, folder, tokenizer, flag="--eval_dataset")[1].from_cache
    for options in (
        {"tokenizer": make_tokenizer("pad_is_eos")},
        {"tokenizer": make_tokenizer(chat_template=CHAT_TEMPLATE + "{# #}")},
        {"tokenizer": make_tokenizer(add_bos=False)},
        {"max_tokens": 199},
        {"system_prompt": "s"},
        {"prompt_format": "chat"},
        {"train_on": "full"},
        {"overlong": "truncate"},
        {"template_kwargs": {"a": 1}},
    ):
        assert not cached(paths, folder, **options)[1].from_cache, options
        assert cached(paths, folder, **options)[1].from_cache, options
    assert not cached([paths[0] + "[:1]"], folder)[1].from_cache
    assert not cached(paths * 2, folder)[1].from_cache
    write(tmp_path / "a.jsonl", [*rows, {"text": "x"}])
    longer, report = cached(paths, folder)
    assert len(longer) == 2 and not report.from_cache
    assert not list(folder.glob(".*"))  # no temporary folder stays


def test_cache_follows_the_date_that_a_template_writes(tmp_path, monkeypatch):
    paths = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    tokenizer = make_tokenizer(chat_template="{{ strftime_now('%Y') }}" + CHAT_TEMPLATE)
    keys = {cache.cache_key(tokenizer, 1)}

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls):
            return cls(2099, 1, 1)

    monkeypatch.setattr(cache, "date", Tomorrow)
    assert cache.cache_key(tokenizer, 1) not in keys
    assert len(cached(paths, tmp_path / "cache", tokenizer)[0]) == 1


@pytest.mark.parametrize(
    "damage",
    [
        "cut",
        "empty",
        "missing",
        "garbage",
        "header",
        "other shape",
        "about",
        "other report",
        "zeros",
    ],
)
def test_damaged_cache_is_built_anew(tmp_path, damage):
    paths = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    expected = cached(paths, tmp_path / "cache")[0][:]
    (folder,) = (tmp_path / "cache").iterdir()
    file = folder / "input_ids.npy"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "other shape":
        np.save(file, np.zeros(3, np.int32))
    elif damage == "about":
        (folder / "about.json").write_text("{")
    elif damage == "other report":
        about = json.loads((folder / "about.json").read_text())
        (folder / "about.json").write_text(json.dumps(about | {"report": {"rows": 1}}))
    elif damage == "zeros":  # right shape: blocks that never reached the disk
        file.write_bytes(content[:128] + b"\0" * (len(content) - 128))
    else:
        changed = {"cut": content[:-8], "empty": b"", "garbage": b"x" * 200}
        changed["header"] = content.replace(b"}", b"{", 1)  # numpy: tokenize.TokenError
        file.write_bytes(changed[damage])
    rebuilt, report = cached(paths, tmp_path / "cache")
    assert not report.from_cache and rebuilt[:] == expected
    assert cached(paths, tmp_path / "cache")[1].from_cache


def test_cache_folder_that_cannot_be_written_is_only_a_note(tmp_path):
    paths = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    (tmp_path / "file").write_text("not a folder")
    dataset, report = cached(paths, tmp_path / "file" / "cache")
    assert len(dataset) == 1 and "not cached: " in str(report)


def test_two_runs_that_fill_the_cache_at_once(tmp_path):
    """The slower one found the other's folder in place of its own."""
    arrays = {"a": np.arange(5)}
    cache.save_arrays(tmp_path / "key", arrays, {"n": 1})
    cache.save_arrays(tmp_path / "key", arrays, {"n": 2})
    assert cache.load_arrays(tmp_path / "key")[1] == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_two_ranks_get_the_same_data_and_the_same_error(tmp_path):
    write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"text": "12"}, {"text": ""}])
    result = subprocess.run(
        command("tests/run_data.py", tmp_path, ranks=2),
        env=environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    told = {line.partition(": ")[2] for line in result.stdout.splitlines() if "rank" in line}
    (line,) = told
    assert result.stdout.count(line) == 2 and "missing.jsonl: no such file" in line


def test_base_model_is_told_that_nothing_separates_prompt_and_answer(tmp_path):
    """Instruction rows were glued to their answers without a word about it."""
    rows = [{"instruction": "say hi", "output": "hello"}]
    paths = write(tmp_path / "a.jsonl", rows)
    assert "--chat_template FILE" in str(load(paths, make_tokenizer("no_template"))[1])
    assert not load(paths, make_tokenizer())[1].notes
    with pytest.raises(ValueError, match="--chat_template_args: .*'enable_thinking'"):
        load(paths, make_tokenizer(), template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match="--chat_template_args"):
        load(paths, make_tokenizer("no_template"), template_kwargs={"enable_thinking": False})


def test_every_dataset_name_has_its_own_line(tmp_path):
    """A source of which nearly everything was dropped was lost in the sum of a mixture."""
    long = {"messages": [USER, {"role": "assistant", "content": "x" * 300}]}
    one = write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 3)
    two = write(tmp_path / "b.jsonl", [{"messages": CHAT}, long, long])
    text = str(load([*one, *two], make_tokenizer())[1])
    assert f"{one[0]}: 3 rows -> 3 sequences, 0 dropped" in text
    assert f"{two[0]}: 3 rows -> 1 sequence, 2 dropped" in text


def test_answers_marked_as_not_trained_are_not_trained_as_plain_text_either(tmp_path):
    answer = {"role": "assistant", "content": "hello", "weight": 0}
    rows = [{"messages": [USER, answer]}, {"messages": CHAT}]
    kept, report = load(write(tmp_path / "a.jsonl", rows), prompt_format="text")
    assert len(kept) == 1 and report.dropped == {"no_target": 1}


def test_writing_the_cache_deletes_nothing_of_the_users(tmp_path):
    """Leftovers of killed runs went by ".*.*": also hidden folders of others, if old enough."""
    leftover = f".{'a' * 32}.{'b' * 32}"
    for name in (leftover, ".config.d", ".git.backup", f".{'a' * 32}.mine"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / f".{'c' * 32}.{'d' * 32}").mkdir()  # of a run that is writing now
    cache.save_arrays(tmp_path / ("0" * 32), {"x": np.zeros(3)}, {})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert leftover not in left and len(left) == 5
