"""Rows in every accepted format become the right ids and masks, a clear error or a counted drop."""

import gzip
import json
import sys

import numpy as np
import pytest
from tiny import FLAVOURS, make_tokenizer

from common.data import (
    TokenRow,
    load_prompts,
    load_sft_rows,
    read_rows,
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
    return load_prompts(paths, tokenizer or make_tokenizer(), **options)


def sft(tmp_path, rows, tokenizer=None, **options):
    paths = write(tmp_path / "rows.jsonl", rows)
    options = {"max_tokens": 200} | options
    return load_sft_rows(paths, tokenizer or make_tokenizer(), **options)


def trained(row, tokenizer):
    """Decoded targets, a | between separate stretches."""
    shown = render_example(row, tokenizer, max_chars=10_000)
    return "|".join(part.partition("»")[0] for part in shown.split("«")[1:])


# ---- files ----


def test_read_rows_formats_agree(tmp_path):
    rows = [{"prompt": "a\u2028b", "n": [1, 2]}, {"prompt": "c", "n": [3]}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    # what Windows editors write: byte order mark, CRLF, blank lines, no newline at the end
    windows = "\ufeff" + lines.replace("\n", "\r\n\r\n").rstrip()
    (tmp_path / "b.jsonl").write_text(windows, encoding="utf-8", newline="")
    (tmp_path / "c.json").write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "d.json").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "e.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    with gzip.open(tmp_path / "f.json.gz", "wt", encoding="utf-8") as file:
        json.dump(rows, file)
    for path in sorted(tmp_path.iterdir()):
        assert read_rows([str(path)]) == rows, path
    assert read_rows([str(tmp_path)]) == rows * 6


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
    loaded, drops = load_prompts(
        [str(tmp_path / "train.parquet")], make_tokenizer(), max_prompt_tokens=64
    )
    assert drops == {}
    assert loaded[0].prompt == [{"role": "user", "content": "1+1?"}]
    assert loaded[0].columns == {
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0},
        "tags": ["x", "y"],
        "ground_truth": "2",
    }
    assert type(loaded[0].columns["tags"]) is list


def test_directory_with_splits_reads_the_asked_one(tmp_path):
    """Training on a directory that also holds the test file must not train on the test rows."""
    write(tmp_path / "toy_train.jsonl", [{"prompt": "a"}])
    write(tmp_path / "toy_test.jsonl", [{"prompt": "b"}])
    (tmp_path / "notes.txt").write_text("not data")
    assert read_rows([str(tmp_path)]) == [{"prompt": "a"}]
    assert read_rows([str(tmp_path)], split="test") == [{"prompt": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', r"--eval_dataset=.*x\.jsonl.* line 3"),
        ("x.json", '[\n{"prompt": "a"},\n{]', r"x\.json.* line 3"),
        ("x.jsonl", '{"prompt": "a"}\n[1]\n', r"x\.jsonl: row 2 is a list"),
        ("x.json", "[1, 2]", "row 1 is a int"),
        ("x.jsonl", "\n \n", "no rows"),
        ("x.json", "[]", "no rows"),
        ("x.jsonl.gz", "not gzip", "cannot be read"),
        ("x.csv", "prompt\na\n", r"expected \.jsonl"),
        (None, "", r"missing\.jsonl: no such file"),
    ],
)
def test_bad_files_name_flag_file_and_place(tmp_path, name, content, message):
    path = tmp_path / (name or "missing.jsonl")
    if name:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows([str(path)], flag="--eval_dataset")
    assert str(error.value).startswith(f"--eval_dataset={path}")


def test_missing_file_is_found_before_the_first_is_read(tmp_path):
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(ValueError, match="no such file"):
        read_rows([str(tmp_path / "broken.jsonl"), str(tmp_path / "missing.parquet")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="the directory has no"):
        read_rows([str(tmp_path / "empty")])


def test_hub_name_and_config(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(name, config, split):
            if name != "org/name":
                raise FileNotFoundError("not on the hub")
            return type("D", (), {"to_list": lambda self: [{"text": f"{config} {split}"}]})()

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert read_rows(["org/name"]) == [{"text": "None train"}]
    assert read_rows(["org/name:main"], split="test") == [{"text": "main test"}]
    with pytest.raises(ValueError, match="--dataset=org/nme: no such local file.*not on the hub"):
        read_rows(["org/nme"])


# ---- prompts ----


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
        {"prompt": [USER, {"role": "tool", "content": "x"}]},
    ]
    kept, drops = prompts(tmp_path, rows, max_prompt_tokens=32)
    assert [row.prompt for row in kept] == ["short"]
    assert drops == {
        "too_long": 1,
        "empty_prompt": 3,
        "prompt_ends_with_assistant": 1,
        "tools_not_supported": 1,
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
        ({"problem": "x", "level": 1}, {}, r"row 1: .*\['level', 'problem'\].*question\+answer"),
        ({"prompt": 5}, {}, "row 1: expected text or a list"),
        ({"prompt": ["hi"]}, {}, "expected text or a list"),
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
    """P07: templates strip the reasoning of earlier turns; masks counted on the raw text slip."""
    tokenizer = make_tokenizer(chat_template=THINKING)
    answer = {"role": "assistant", "content": "<think>so</think>yes"}
    loaded, drops = sft(tmp_path, [{"messages": [USER, answer, USER, answer]}], tokenizer)
    assert drops == {}
    assert trained(loaded[0], tokenizer) == "yes<|im_end|>|<think>so</think>yes<|im_end|>"


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
        "too_long": 1,
        "tools_not_supported": 3,
        "starts_with_assistant": 1,
    }
    with pytest.raises(ValueError, match=r"all 1 rows .*no_target.*max_tokens=200"):
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
