"""Preference rows in every format become pairs that share their prompt, to compare or to score."""

import json
import math
import pickle
import subprocess

import numpy as np
import pytest
from launch import ROOT, command, environment
from test_chat import MISTRAL, QWEN3, QWEN25, TOOL, TOOL_CHAT
from tiny import CHAT_TEMPLATE, FLAVOURS, make_tokenizer
from tokenizers import AddedToken

from common import data
from common import pairs as pairs_module
from common.data import TokenRow, load_sft_rows
from common.formats import Drop, as_tools, detect_pair_format, parse_pair
from common.pairs import PairRow, ResponseEncoder, load_pairs, overlap_report, render_pair

USER = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("hello", "he no"))
SYSTEM = {"role": "system", "content": "be brief"}
ROW = {"prompt": "hi", "chosen": "hello", "rejected": "he no"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def load(paths, tokenizer=None, **options):
    options = {"max_tokens": 200, "for_scoring": False} | options
    return load_pairs(paths, tokenizer or make_tokenizer(), **options)


def pairs(tmp_path, rows, tokenizer=None, **options):
    return load(write(tmp_path / "rows.jsonl", rows), tokenizer, **options)


def pair(tmp_path, row, tokenizer=None, **options):
    dataset, report = pairs(tmp_path, [row], tokenizer, **options)
    assert len(dataset) == 1 and not report.dropped
    return dataset[0]


def sequences(tmp_path, row, tokenizer=None, **options):
    """What the model sees of a pair."""
    found = pair(tmp_path, row, tokenizer, **options)
    return found.chosen, found.rejected, found.num_shared


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def targets(row, tokenizer):
    """Decoded targets; where they begin."""
    start = row.loss_mask.index(True)
    kept = [i for i, trained in zip(row.input_ids, row.loss_mask, strict=True) if trained]
    return tokenizer.decode(kept), start


# ---- formats ----


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (ROW, "prompt"),
        (ROW | {"completion": "x", "text": "y", "conversations": None}, "prompt"),
        ({"prompt": [USER], "chosen": "hello", "rejected": "he no"}, "prompt"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "prompt"),
        ({"prompt": [USER], "chosen": GOOD, "rejected": "he no"}, "prompt"),
        ({"prompt": "hi", "chosen": [USER, GOOD], "rejected": [BAD]}, "prompt"),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt"),
        ({"prompt": "", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt"),
        ({"prompt": [], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt"),
        # UltraFeedback, binarised
        (
            {
                "prompt": "hi",
                "prompt_id": "f0",
                "chosen": [USER, GOOD],
                "rejected": [USER, BAD],
                "messages": [USER, GOOD],
                "score_chosen": 6.0,
                "score_rejected": 4.5,
            },
            "prompt",
        ),
        ({"messages": [USER], "chosen": GOOD, "rejected": [BAD]}, "messages"),
        (
            {"messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "messages",
        ),
        # ShareGPT style
        (
            {
                "conversations": [{"from": "human", "value": "hi"}],
                "chosen": {"from": "gpt", "value": "hello"},
                "rejected": {"from": "gpt", "value": "he no"},
            },
            "conversations",
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ""),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": None}, ""),
        # Intel's orca_dpo_pairs
        ({"system": "", "question": "hi", "chosen": "hello", "rejected": "he no"}, "question"),
        ({"question": "hi", "chosen": [USER, GOOD], "rejected": [BAD]}, "question"),
        # LLaMA-Factory's alpaca rankings
        ({"instruction": "hi", "chosen": "hello", "rejected": "he no"}, "instruction"),
        (
            {"instruction": "", "input": "hi", "history": [], "chosen": "hello", "rejected": BAD},
            "instruction",
        ),
    ],
)
def test_every_format_gives_the_same_pair(tmp_path, row, name):
    tokenizer = make_tokenizer()
    for for_scoring in (False, True):
        dataset, report = pairs(tmp_path, [row], tokenizer, for_scoring=for_scoring)
        assert report.formats == {f"{name}+chosen+rejected".removeprefix("+"): 1}
        expected = sequences(tmp_path, ROW, tokenizer, for_scoring=for_scoring)
        assert (dataset[0].chosen, dataset[0].rejected, dataset[0].num_shared) == expected
    # the same chosen side as in SFT
    if not row.keys() & {"messages", "completion"}:
        sft, _ = load_sft_rows(write(tmp_path / "a.jsonl", [row]), tokenizer, max_tokens=200)
        chosen = pair(tmp_path, row, tokenizer).chosen
        assert sft[0].input_ids[: len(chosen.input_ids)] == chosen.input_ids


@pytest.mark.parametrize(
    "row",
    [
        {"system": "be brief", **ROW},
        {"system": "be brief", "prompt": [USER], "chosen": GOOD, "rejected": BAD},
        {"system": "be brief", "question": "hi", "chosen": "hello", "rejected": "he no"},
        {"system": "be brief", "instruction": "hi", "chosen": "hello", "rejected": "he no"},
        {"system": "be brief", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [SYSTEM, USER], "chosen": "hello", "rejected": "he no"},
        {"prompt": [SYSTEM], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "hi", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
        {"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
    ],
)
def test_system_prompts_of_every_kind(tmp_path, row):
    tokenizer = make_tokenizer()
    expected = sequences(tmp_path, ROW, tokenizer, system_prompt="be brief")
    assert sequences(tmp_path, row, tokenizer) == expected
    assert sequences(tmp_path, row, tokenizer, system_prompt="other") == expected
    assert "system\nbe brief<|im_end|>" in tokenizer.decode(expected[1].input_ids)


def test_instructions_with_input_and_history(tmp_path):
    """The question was thrown away, and the answers trained as bare texts."""
    tokenizer = make_tokenizer()
    row = {"instruction": "add", "input": "1 2", "history": [["hi", "hello"]], "system": "be brief"}
    row |= {"chosen": "3", "rejected": "4"}
    turns = [SYSTEM, USER, GOOD, {"role": "user", "content": "add\n\n1 2"}]
    for for_scoring in (False, True):
        expected = {"prompt": turns, "chosen": "3", "rejected": "4"}
        assert sequences(tmp_path, row, tokenizer, for_scoring=for_scoring) == sequences(
            tmp_path, expected, tokenizer, for_scoring=for_scoring
        )
    plain = {"question": "2+2", "chosen": "4", "rejected": "5"}
    report = pairs(tmp_path, [plain], make_tokenizer("no_template"))[1]
    assert "answers follow their prompts without any separator" in str(report)


def test_the_prompt_may_be_the_last_question_of_whole_conversations(tmp_path):
    """Multi-turn rows whose `prompt` column is not the beginning got two prompts, or none."""
    turns = [USER, GOOD, {"role": "user", "content": "12?"}]
    whole = {"chosen": [*turns, GOOD], "rejected": [*turns, BAD]}
    expected = sequences(tmp_path, whole)
    assert sequences(tmp_path, whole | {"prompt": "12?"}) == expected
    assert sequences(tmp_path, whole | {"prompt": turns}) == expected
    # an answer before the question is none of the prompt's turns
    answers = {"prompt": "hi", "chosen": [GOOD, USER, GOOD], "rejected": [BAD]}
    tokenizer = make_tokenizer()
    assert targets(pair(tmp_path, answers, tokenizer).chosen, tokenizer)[0].count("hello") == 2
    sft, _ = load_sft_rows(write(tmp_path / "a.jsonl", [answers]), tokenizer, max_tokens=200)
    assert targets(sft[0], tokenizer)[0].count("hello") == 2
    _, report = pairs(tmp_path, [whole, whole | {"prompt": "13?"}])
    assert report.dropped == {"prompts_differ": 1}


HH = "\n\nHuman: hi\n\nAssistant: 12\n\nHuman: say it\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (f"{HH} I say hello", f"{HH} I say no", HH),
        (f"{HH} yes", f"{HH} yes, yes", HH),
        (f"{HH} yes\n\nHuman: a\n\nAssistant: b", f"{HH} no", HH),
        ("2+2= 4", "2+2= 5", "2+2="),
        ("Say it.\n\nyes", "Say it.\n\nno", "Say it."),
        ("Say yellow", "Say yes", "Say"),
        ("so it is", "so it is so", "so it"),
        ("so it ", "so it is", "so"),
        ("so it is", "so it is", "so it"),
        # control tokens that both begin with are the prompt's, with white space behind or without
        ("a b<|im_end|>yes", "a b<|im_end|>no", "a b<|im_end|>"),
        ("<|im_start|>a\nyes", "<|im_start|>a\nno", "<|im_start|>a"),
        ("a yes<eos>", "a yes<eos>", "a"),
    ],
)
def test_texts_without_a_prompt_are_cut_where_they_part(tmp_path, chosen, rejected, prompt):
    """HH-RLHF and the like are plain text, also where there is a chat template."""
    row = {"chosen": chosen, "rejected": rejected, "system": " ", "input": None, "messages": None}
    example = parse_pair(row, detect_pair_format(row))
    assert example.whole_texts and prompt.startswith(example.prompt)
    assert example.prompt + example.chosen == chosen
    assert example.prompt + example.rejected == rejected
    tokenizer = make_tokenizer()
    found = pair(tmp_path, row, tokenizer)
    assert tokenizer.decode(found.chosen.input_ids) == f"<bos>{chosen.removesuffix('<eos>')}<eos>"
    prompt_length = len(tokenizer(prompt)["input_ids"])
    response = rejected.removeprefix(prompt).removesuffix("<eos>")
    assert targets(found.rejected, tokenizer) == (f"{response}<eos>", prompt_length)
    scored = pair(tmp_path, row, tokenizer, for_scoring=True)
    assert scored.chosen.input_ids == found.chosen.input_ids
    assert scored.prompt_length == found.prompt_length == prompt_length
    note = "note: of two texts without a prompt column the prompt is what both begin with, of Human"
    assert note in str(pairs(tmp_path, [row], tokenizer)[1])
    with pytest.raises(ValueError, match="--system_prompt has no place in rows of whole texts"):
        pair(tmp_path, row, tokenizer, system_prompt="x")


@pytest.mark.parametrize(
    "column", ["input", "query", "context", "system", "Prompt", "dialogue", "system_prompt"]
)
@pytest.mark.parametrize("value", ["hi", [USER]])
def test_texts_beside_a_prompt_that_is_not_read_are_an_error(tmp_path, column, value):
    row = {"chosen": "so yes", "rejected": "so no", "id": 1}
    with pytest.raises(ValueError, match=f"row 2 of rows.jsonl: {column}: would be lost.*'chosen'"):
        pairs(tmp_path, [row, row | {column: value}])
    for empty in (None, "", " ", [], {}):
        assert len(pairs(tmp_path, [row, row | {column: empty}])[0]) == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ROW | {"chosen": ""}, "empty_response: .*chosen side"),
        (ROW | {"rejected": None}, "empty_response: .*rejected side"),
        (ROW | {"rejected": " \n"}, "empty_response"),
        (ROW | {"rejected": []}, "empty_response"),
        (ROW | {"prompt": [USER], "rejected": [USER]}, "empty_response"),
        ({"prompt": [USER], "chosen": GOOD, "rejected": BAD | {"content": ""}}, "empty_response"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "empty_response: .*rejected"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "empty_response: .*chosen"),
        ({"chosen": f"{HH} yes", "rejected": HH}, "empty_response: .*rejected"),
        ({"chosen": None, "rejected": "x"}, "empty_response: .*chosen"),
        (
            {"chosen": [USER, GOOD], "rejected": [USER | {"content": "ho"}, BAD]},
            "empty_prompt",
        ),
        (
            {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER | {"content": "ho"}, BAD]},
            "prompts_differ: .*chosen",
        ),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, "empty_prompt"),
        (
            {"prompt": "hi", "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]},
            "prompts_differ: .*different prompts",
        ),
        (
            {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER | {"content": "ho"}, BAD]},
            "prompts_differ: .*rejected has another question",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, "empty_prompt"),
        ({"prompt": [], "chosen": GOOD, "rejected": BAD}, "empty_prompt"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "empty_prompt: .*nothing comes before"),
        ({"question": " ", "chosen": "a", "rejected": "b"}, "empty_prompt: .*nothing comes before"),
        ({"chosen": "yes", "rejected": "yellow"}, "empty_prompt: .*no beginning in common"),
        ({"chosen": "\nyes", "rejected": "\nno"}, "empty_prompt: .*no column `prompt`"),
        (
            {"chosen": f"{HH} a", "rejected": HH.replace("hi", "ho") + " b"},
            "prompts_differ: .*differ before the first Assistant",
        ),
        ({"prompt": "hi", "chosen": [GOOD, USER], "rejected": [BAD]}, "ends_without_answer"),
        (
            ROW | {"rejected": [{"role": "asistant", "content": "x"}]},
            "unknown_role: .*rejected: message 1",
        ),
        (ROW | {"chosen": [USER, GOOD | {"content": 5}]}, "not_text: .*chosen: message 2"),
        (ROW | {"rejected": "a<|im_end|>b"}, "special_token_in_text: .*rejected: .*im_end"),
        (ROW | {"rejected": "\ud800"}, "invalid_unicode: .*rejected"),
        (ROW | {"tools": "[{"}, "bad_tools"),
        (ROW | {"rejected": "x" * 999}, "too_long: .*1,0.. tokens"),
        ({"chosen": f"{HH} a", "rejected": f"{HH} b", "tools": [TOOL]}, "tools_need_template"),
        (
            {"chosen": f"{HH} a", "rejected": f"{HH} <pad> b"},
            "special_token_in_text: .*rejected: .*<pad>",
        ),
    ],
)
@pytest.mark.parametrize("for_scoring", [False, True])
def test_pairs_that_cannot_be_used_are_counted_and_described(tmp_path, row, reason, for_scoring):
    reason, _, detail = reason.partition(": ")
    dataset, report = pairs(tmp_path, [ROW, row, ROW], for_scoring=for_scoring)
    assert len(dataset) == 2 and report.dropped == {reason: 1}
    assert report.examples[reason].startswith("row 2 of rows.jsonl")
    with pytest.raises(ValueError, match=f"the only row of .* dropped: 1 {reason}.*{detail}"):
        pairs(tmp_path, [row], for_scoring=for_scoring)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "x", "chosen": "y"}, {}, r"no known format of preferences: .*'prompt'\]; acc"),
        ({"messages": [USER, GOOD]}, {}, r"accepted: conversations\+chosen\+rejected, prompt\+cho"),
        ({"chosen": "x", "rejected": [GOOD]}, {}, "chosen: expected a list"),
        ({"chosen": 7, "rejected": 8}, {}, "chosen: expected a list .*found 7"),
        (ROW | {"rejected": 7}, {}, "rejected: expected a list .*found 7"),
        (ROW | {"prompt": 7}, {}, "prompt: expected text or a list"),
        (ROW | {"margin": "big"}, {}, "margin: expected a number up to 1e30, found 'big'"),
        (ROW | {"margin": "nan"}, {}, "margin: expected a number up to 1e30, found 'nan'"),
        (ROW | {"margin": True}, {}, "margin: expected a number up to 1e30, found True"),
        (ROW | {"margin": [1]}, {}, r"margin: expected a number up to 1e30, found \[1\]"),
        (ROW | {"margin": 10**400}, {}, "margin: expected a number up to 1e30, found 1000"),
        (ROW | {"margin": -1.1e30}, {}, "margin: expected a number up to 1e30"),
        (ROW | {"margin": math.inf}, {}, "margin: expected a number up to 1e30, found inf"),
        (ROW | {"margin": "1e999"}, {}, "margin: expected a number up to 1e30, found '1e999'"),
        (ROW | {"chosen_score": 1, "rejected_score": "x"}, {}, "rejected_score: expected a number"),
        (
            ROW | dict.fromkeys(("score_chosen", "score_rejected"), math.inf),
            {},
            "score_chosen: exp",
        ),
        (
            ROW | {"prompt": [USER]},
            {"tokenizer": make_tokenizer("no_template")},
            "no chat template",
        ),
        (ROW | {"prompt": [USER, GOOD, USER]}, {"prompt_format": "text"}, "a single user turn"),
        (ROW, {"overlong": "cut"}, "--overlong=cut: expected drop or truncate"),
        (ROW, {"tokenizer": make_tokenizer("no_template"), "system_prompt": "s"}, "--system_pro"),
    ],
)
def test_mistakes_are_errors_with_their_place(tmp_path, row, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        pairs(tmp_path, [ROW, row], **options)
    assert str(caught.value).startswith(("--dataset: row 2 of rows.jsonl: ", "--overlong", "--sys"))


def test_margins_and_grades(tmp_path):
    rows = [
        ROW | {"margin": 1.5, "chosen_score": 8, "rejected_score": 2},
        ROW | {"margin": " ", "score_chosen": "7.5", "score_rejected": None},
        ROW | {"chosen_rating": 5, "rejected_rating": 1.0, "chosen_score": None},
        ROW | {"margin": "-1.0", "chosen-rating": 4, "rejected-rating": "3"},
        ROW,
    ]
    dataset, report = pairs(tmp_path, rows)
    assert dataset.num_margins == 2 and dataset.margins.tolist() == [1.5, 0, 0, -1, 0]
    nan = math.nan
    expected = [[8, 2], [7.5, nan], [5, 1], [4, 3], [nan, nan]]
    np.testing.assert_array_equal(dataset.grades, expected)
    assert dataset[0].margin == 1.5 and dataset[0].grades == (8.0, 2.0)
    lines = str(report).splitlines()
    assert "  2 pairs with a margin" in lines and "  3 pairs with grades" in lines
    assert "  1 pair with a negative margin, which contradicts the label" in lines
    assert "graded lower" not in str(report)
    without = pairs(tmp_path, [ROW, ROW | {"margin": math.nan}])
    assert without[0].num_margins == 0 and "margin" not in str(without[1])


def test_grades_that_contradict_their_labels_are_counted(tmp_path):
    grades = [(1, 2), ("1", "8.0"), (3, 9), (5, 5), (2, 1), (None, 1), (7, None)]
    rows = [ROW | {"chosen_rating": a, "rejected_rating": b} for a, b in grades]
    report = pairs(tmp_path, rows)[1]
    assert "3 pairs with a chosen side that is graded lower, 1 equal" in str(report)
    report = pairs(tmp_path, rows[3:5])[1]
    assert "  0 pairs with a chosen side that is graded lower, 1 equal" in str(report).splitlines()
    assert "graded" not in str(pairs(tmp_path, rows[4:])[1])


# ---- sequences ----


@pytest.mark.parametrize("flavour", FLAVOURS[:3])
def test_sides_to_compare_are_what_an_engine_would_sample(tmp_path, flavour):
    """Behind the stop token nothing follows; the last prompt token predicts on both sides."""
    tokenizer = make_tokenizer(flavour)
    found = pair(tmp_path, ROW, tokenizer)
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    for side, text in ((found.chosen, "hello<|im_end|>"), (found.rejected, "he no<|im_end|>")):
        assert side.input_ids == prompt + ids_of(tokenizer, text)
        assert side.loss_mask == [t >= len(prompt) for t in range(len(side.input_ids))]
    assert found.num_shared == len(prompt) - 1
    assert found.margin == 0 and np.isnan(found.grades).all()


def test_all_turns_of_a_longer_response_are_targets(tmp_path):
    tokenizer = make_tokenizer()
    row = {"prompt": [USER], "chosen": [GOOD, USER, GOOD], "rejected": [GOOD, USER, BAD]}
    found = pair(tmp_path, row, tokenizer)
    assert targets(found.rejected, tokenizer)[0] == "hello<|im_end|>he no<|im_end|>"
    assert found.rejected.loss_mask[-1] and found.num_shared + 1 == found.chosen.loss_mask.index(1)
    # without a prompt column the first answer is part of the prompt
    row = {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}
    assert targets(pair(tmp_path, row, tokenizer).rejected, tokenizer)[0] == "he no<|im_end|>"


def test_responses_that_need_several_contexts_are_dropped_but_can_be_scored(tmp_path):
    """Qwen3 removes earlier thoughts: no single sequence has the log-probs of both turns."""
    tokenizer = make_tokenizer(chat_template=QWEN3)
    thinking = GOOD | {"content": "<think>\nso\n</think>\n\nhello"}
    row = {"prompt": [USER], "chosen": [thinking, USER, thinking], "rejected": [BAD]}
    simple = {"chosen": [USER, thinking, USER, thinking], "rejected": [USER, thinking, USER, BAD]}
    dataset, report = pairs(tmp_path, [simple, row], tokenizer)
    assert len(dataset) == 1 and report.dropped == {"several_contexts": 1}
    assert report.examples["several_contexts"].startswith("row 2 of rows.jsonl: chosen: ")
    dataset, report = pairs(tmp_path, [simple, row], tokenizer, for_scoring=True)
    assert len(dataset) == 2 and not report.dropped
    expected = tokenizer.apply_chat_template([USER, *row["chosen"]], return_dict=False)
    assert dataset[1].chosen.input_ids == expected


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, QWEN25, QWEN3, MISTRAL])
@pytest.mark.parametrize("system_prompt", [None, "be brief"])
def test_sides_to_score_are_what_the_standard_loaders_are_given(tmp_path, template, system_prompt):
    """The whole conversation as the template writes it, whatever follows the stop token."""
    tokenizer = make_tokenizer(chat_template=template)
    encoder = ResponseEncoder(tokenizer, system_prompt=system_prompt)
    system = [SYSTEM] if system_prompt else []
    for prompt in ([USER], [USER, GOOD, USER], [SYSTEM, USER]):
        row = {"prompt": prompt, "chosen": "hello 12", "rejected": "hello no=12"}
        found = pair(tmp_path, row, tokenizer, for_scoring=True, system_prompt=system_prompt)
        context = prompt if prompt[0] == SYSTEM else system + prompt
        for side, text in ((found.chosen, row["chosen"]), (found.rejected, row["rejected"])):
            messages = [*context, {"role": "assistant", "content": text}]
            expected = tokenizer.apply_chat_template(messages, return_dict=False)
            assert side.input_ids == expected == encoder.ids(prompt, text)
            assert not any(side.loss_mask)
        # what both have in common reaches into the responses
        chosen, rejected = found.chosen.input_ids, found.rejected.input_ids
        n = found.num_shared
        assert chosen[:n] == rejected[:n] and chosen[n] != rejected[n]
        assert tokenizer.decode(chosen[:n]).endswith("hello ")
    assert encoder.ids("hi", "yes") == encoder.ids([USER], "yes")


def test_tools_and_calls(tmp_path):
    tokenizer = make_tokenizer(chat_template=QWEN25)
    call, result, answer = TOOL_CHAT[1:]
    row = {"prompt": TOOL_CHAT[:1], "tools": [TOOL]}
    row |= {"chosen": [call, result, answer], "rejected": [BAD]}
    found = pair(tmp_path, row, tokenizer, max_tokens=999)
    text, _ = targets(found.chosen, tokenizer)
    assert text.count("<tool_call>") == 1 and text.endswith("Hot.<|im_end|>")
    assert "31 degrees" not in text and '"weather"' in tokenizer.decode(found.rejected.input_ids)
    scored = pair(tmp_path, row, tokenizer, for_scoring=True, max_tokens=999)
    ids = ResponseEncoder(tokenizer).ids(TOOL_CHAT[:1], "he no", as_tools([TOOL]))
    assert scored.rejected.input_ids == ids


@pytest.mark.parametrize(
    ("prompt", "response", "reason"),
    [
        ("hi", "", "empty_response"),
        ("hi", "a<|im_end|>b", "special_token_in_text"),
        ("", "a", "empty_turn"),
        ([{"role": "usr", "content": "hi"}], "a", "unknown_role"),
    ],
)
def test_responses_that_cannot_be_scored(prompt, response, reason):
    with pytest.raises(Drop, match=reason):
        ResponseEncoder(make_tokenizer()).ids(prompt, response)


def test_what_a_template_loses_cannot_be_scored(tmp_path):
    template = CHAT_TEMPLATE.replace("m['content']", "m['content'].replace('no', '')")
    dataset, report = pairs(
        tmp_path,
        [ROW, ROW | {"rejected": "yes"}, ROW | {"rejected": "12"}],
        make_tokenizer(chat_template=template),
        for_scoring=True,
    )
    assert len(dataset) == 2 and report.dropped == {"template_loses_text": 1}


def test_templates_without_a_stop_token_can_be_scored_with(tmp_path):
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE.replace("<|im_end|>", ""))
    assert pair(tmp_path, ROW, tokenizer, for_scoring=True)
    with pytest.raises(ValueError, match="learn to stop"):
        pair(tmp_path, ROW, tokenizer)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_plain_text(tmp_path, add_bos, add_eos):
    tokenizer = make_tokenizer("no_template", add_bos=add_bos, add_eos=add_eos)
    bos, eos = [tokenizer.bos_token_id] * add_bos, [tokenizer.eos_token_id]
    row = {"prompt": "a hi", "chosen": " hello", "rejected": " no<eos>"}
    for for_scoring in (False, True):
        found = pair(tmp_path, row, tokenizer, for_scoring=for_scoring)
        assert found.chosen.input_ids == bos + ids_of(tokenizer, "a hi hello") + eos
        assert found.rejected.input_ids == bos + ids_of(tokenizer, "a hi no") + eos
        # the responses' space is shared, but predicted
        assert found.num_shared == len(bos) + len("a hi") + (1 if for_scoring else -1)
    assert targets(pair(tmp_path, row, tokenizer).rejected, tokenizer)[0] == " no<eos>"
    assert ResponseEncoder(tokenizer).ids("a hi", " hello") == found.chosen.input_ids
    # messages as plain text
    chat = {"prompt": [{"role": "user", "content": "a hi"}], "chosen": " hello", "rejected": " no"}
    with_template = make_tokenizer(add_bos=add_bos, add_eos=add_eos)
    found = sequences(tmp_path, chat, with_template, prompt_format="text")
    assert found == sequences(tmp_path, row, tokenizer)
    # to compare and to score, with a BOS and without
    for nothing in ({"prompt": ""}, {"prompt": "\n"}, {}):
        nothing |= {"chosen": "a", "rejected": "b"}
        for for_scoring in (False, True):
            _, report = pairs(tmp_path, [row, nothing], tokenizer, for_scoring=for_scoring)
            assert report.dropped == {"empty_prompt": 1}


@pytest.mark.parametrize("for_scoring", [False, True])
@pytest.mark.parametrize("prompt_format", ["auto", "text"])
def test_plain_responses_end_with_their_first_stop_token(tmp_path, for_scoring, prompt_format):
    """What follows a control token in a response was trained, though no engine gets there."""
    tokenizer = make_tokenizer("no_template" if prompt_format == "auto" else "distinct")
    options = {"for_scoring": for_scoring, "prompt_format": prompt_format}
    # prompts may be templated already
    good = {"prompt": "<|im_start|>a<eos>b:", "chosen": " yes<eos>", "rejected": " no"}
    bad = [" no<eos>\n", " no<eos><eos>", " <|im_end|>", "<bos>no", "<|im_start|>user\n<eos>"]
    rows = [good, *(good | {"rejected": text} for text in bad), good | {"chosen": bad[0]}]
    if prompt_format == "text":
        rows.append(good | {"rejected": GOOD | {"content": bad[0]}, "prompt": [USER]})
    dataset, report = pairs(tmp_path, rows, tokenizer, **options)
    assert report.dropped == {"special_token_in_text": len(rows) - 1}
    assert "row 2 of rows.jsonl: rejected: the response spells '<eos>'" in str(report)
    (found,) = dataset
    for side, response in ((found.chosen, " yes<eos>"), (found.rejected, " no<eos>")):
        assert tokenizer.decode(side.input_ids) == f"<bos>{good['prompt']}{response}"
    # what is trained can be scored, and nothing else
    encoder = ResponseEncoder(tokenizer, prompt_format=prompt_format)
    assert encoder.ids(good["prompt"], good["chosen"]) == found.chosen.input_ids
    for text in bad:
        with pytest.raises(Drop, match="special_token_in_text"):
            encoder.ids(good["prompt"], text)
    # tags of thoughts are text, even where they are special tokens
    tokenizer.add_tokens([AddedToken("<think>", special=True)])
    assert len(pairs(tmp_path, [good | {"chosen": "<think>12"}], tokenizer, **options)[0]) == 1


def test_prompt_ids_do_not_depend_on_the_response(tmp_path):
    """Tokens merge across the boundary: "7=" + "12" has a token "=1", "7=" + "2" has not."""
    tokenizer = make_tokenizer("no_template")
    row = {"prompt": "7=", "chosen": "12", "rejected": "2"}
    found = pair(tmp_path, row, tokenizer)
    prompt = tokenizer("7=")["input_ids"]
    for side in (found.chosen, found.rejected):
        assert side.input_ids[: len(prompt)] == prompt and side.loss_mask.index(True) == len(prompt)
    assert found.num_shared == len(prompt) - 1
    # a classifier reads the text as it is, so less of it is shared
    scored = pair(tmp_path, row, tokenizer, for_scoring=True)
    assert scored.chosen.input_ids[:-1] == tokenizer("7=12")["input_ids"]
    assert scored.num_shared == len(prompt) - 1
    merging = (
        "{% for m in messages %}<|im_start|>{{ m.role }}={{ m.content }}<|im_end|>{% endfor %}"
    )
    merging += "{% if add_generation_prompt %}<|im_start|>assistant={% endif %}"
    found = pair(tmp_path, row, make_tokenizer(chat_template=merging))
    first = [side.loss_mask.index(True) for side in (found.chosen, found.rejected)]
    assert first == [found.num_shared + 1] * 2
    assert found.chosen.input_ids[: first[0]] == found.rejected.input_ids[: first[0]]


def test_a_side_that_begins_like_the_other(tmp_path):
    """Both scores need a token of their own, though one sequence begins the other."""
    tokenizer = make_tokenizer("no_template")
    row = {"prompt": "a", "chosen": "b", "rejected": "b"}
    found = pair(tmp_path, row, tokenizer, for_scoring=True)
    assert found.num_shared == len(found.chosen.input_ids) - 1
    bare = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    found = pair(tmp_path, row | {"rejected": "bc"}, bare, for_scoring=True)
    assert (len(found.chosen.input_ids), found.num_shared) == (2, 1)


# ---- limits ----


def sized(prompt, chosen, rejected):
    """A row of plain text of so many tokens (without BOS; each response has an EOS as well)."""
    text = "abcdefghij" * 10
    return {"prompt": text[:prompt], "chosen": "C" * chosen, "rejected": "R" * rejected}


def lengths(tmp_path, row, max_tokens, *, add_bos=False, **options):
    tokenizer = make_tokenizer("no_template", add_bos=add_bos)
    options = {"overlong": "truncate", "max_tokens": max_tokens} | options
    dataset, report = pairs(tmp_path, [row], tokenizer, **options)
    for side in (dataset[0].chosen, dataset[0].rejected):
        assert len(side.input_ids) <= max_tokens
    prompt_length = dataset.lengths[0] - dataset.response_lengths[0]
    assert prompt_length[0] == prompt_length[1]
    n = prompt_length[0]
    assert dataset[0].chosen.input_ids[:n] == dataset[0].rejected.input_ids[:n]
    text = tokenizer.decode(dataset[0].chosen.input_ids[:n])
    assert report.truncated in (0, 1)
    return text, *dataset.response_lengths[0].tolist(), report.truncated


@pytest.mark.parametrize("for_scoring", [False, True])
def test_truncation_is_decided_for_the_pair(tmp_path, for_scoring):
    """P22: a long prompt left no response at all, or the longer response's cut was negative."""
    options = {"for_scoring": for_scoring}
    prompt, long = (sized(n, 0, 0)["prompt"] for n in (20, 90))
    # prompt 20, responses 3 and 40 (EOS included), limit 24
    assert lengths(tmp_path, sized(20, 2, 39), 24, **options) == (prompt[-12:], 3, 12, 1)
    assert lengths(tmp_path, sized(20, 39, 2), 24, **options) == (prompt[-12:], 12, 3, 1)
    # the prompt alone is cut if that is enough, and no more of it than it takes
    assert lengths(tmp_path, sized(20, 2, 5), 24, **options) == (prompt[-18:], 3, 6, 1)
    # a short prompt stays as it is
    assert lengths(tmp_path, sized(5, 2, 39), 24, **options) == (prompt[:5], 3, 19, 1)
    # a prompt longer than the limit
    assert lengths(tmp_path, sized(90, 1, 60), 24, **options) == (long[-12:], 2, 12, 1)
    assert lengths(tmp_path, sized(20, 2, 3), 24, **options) == (prompt, 3, 4, 0)
    assert lengths(tmp_path, sized(20, 9, 9), 2, **options) == (prompt[-1:], 1, 1, 1)
    # the BOS stays in front
    options["add_bos"] = True
    assert lengths(tmp_path, sized(20, 2, 39), 24, **options)[0] == "<bos>" + prompt[-11:]


def test_truncation_keeps_masks_and_what_is_shared(tmp_path):
    tokenizer = make_tokenizer("no_template")
    row = sized(20, 5, 39)
    found = pair(tmp_path, row, tokenizer, max_tokens=24, overlong="truncate")
    for side in (found.chosen, found.rejected):
        assert side.loss_mask == [t >= 12 for t in range(len(side.input_ids))]
    assert found.num_shared == 11
    row["rejected"] = "CCC" + row["rejected"]
    scored = pair(tmp_path, row, tokenizer, max_tokens=24, overlong="truncate", for_scoring=True)
    assert scored.num_shared == 15  # 12 of the prompt, CCC
    chat = pair(tmp_path, {**ROW, "rejected": "x" * 99}, max_tokens=30, overlong="truncate")
    assert targets(chat.chosen, make_tokenizer())[0] == "hello<|im_end|>"


@pytest.mark.parametrize("for_scoring", [False, True])
def test_the_limit_holds_for_both_sides(tmp_path, for_scoring):
    """P23: it was checked on the chosen side only."""
    rows = [sized(9, 2, 2), sized(9, 2, 39), sized(9, 39, 2), sized(9, 2, 13)]
    tokenizer = make_tokenizer("no_template", add_bos=False)
    options = {"max_tokens": 23, "for_scoring": for_scoring}
    dataset, report = pairs(tmp_path, rows, tokenizer, **options)
    assert report.dropped == {"too_long": 2} and not report.truncated
    assert dataset.lengths.tolist() == [[12, 12], [12, 23]]
    _, report = pairs(tmp_path, rows, tokenizer, **options | {"overlong": "truncate"})
    assert report.truncated == 2 and not report.dropped
    assert "truncated 2 pairs: prompts have lost their beginning, responses their tail" in str(
        report
    )
    with pytest.raises(
        ValueError, match=r"too_long .*no room for a response\) \(--max_sequence_tokens=1\)$"
    ):
        pairs(tmp_path, rows, tokenizer, **options | {"overlong": "truncate", "max_tokens": 1})


# ---- the dataset and its report ----


def test_dataset_is_a_sequence_of_pairs(tmp_path):
    tokenizer = make_tokenizer()
    one = write(tmp_path / "a.jsonl", [ROW, ROW | {"chosen": "12"}])
    two = write(tmp_path / "b.jsonl", [ROW | {"rejected": "x" * i} for i in (1, 2, 3)])
    dataset, report = load([*one, *two], tokenizer)
    rows = list(dataset)
    assert all(map(equal, rows, dataset[:])) and len(dataset[1:3]) == 2
    assert len(dataset) == 5 and equal(dataset[-1], rows[4]) and type(rows[0].num_shared) is int
    assert dataset.source_sizes == [2, 3] and report.sequences == 5
    sides = [(row.chosen, row.rejected) for row in rows]
    assert dataset.lengths.tolist() == [[len(s.input_ids) for s in pair] for pair in sides]
    assert dataset.num_targets.tolist() == [[sum(s.loss_mask) for s in pair] for pair in sides]
    assert (dataset.response_lengths == dataset.num_targets).all()
    assert dataset.num_shared.tolist() == [row.num_shared for row in rows]
    assert dataset.largest_id == max(max(s.input_ids) for pair in sides for s in pair)
    assert report.tokens == dataset.lengths.sum()
    assert report.target_tokens == dataset.num_targets.sum()
    assert f"{two[0]}: 3 rows -> 3 pairs, 0 dropped" in str(report)
    with pytest.raises(IndexError):
        dataset[5]
    some, report = load([*one, *two], tokenizer, limit=3, cache_dir=tmp_path / "cache")
    assert all(map(equal, some, rows)) and len(some) == 3
    assert some.source_sizes == [2, 1] and "the first 4 rows" in str(report)
    # the checks know of these pairs alone
    lines = str(report).splitlines()
    assert lines[-2] == "  of 3 pairs only:" and lines[-1].startswith("    responses: chosen ")
    assert not (tmp_path / "cache").exists()


def equal(a, b):
    """NaN is not equal to itself."""
    return repr(a) == repr(b)


def test_cache_knows_pairs_from_sequences(tmp_path):
    paths = write(tmp_path / "a.jsonl", [ROW | {"margin": 2}, ROW | {"chosen": ""}])
    folder = tmp_path / "cache"
    load_sft_rows(paths, make_tokenizer(), max_tokens=200, cache_dir=folder)
    fresh, first = load(paths, cache_dir=folder)
    again, second = load(paths, cache_dir=folder)
    assert not first.from_cache and second.from_cache
    assert [*map(repr, again)] == [*map(repr, fresh)] and again.num_margins
    assert isinstance(again.sides.input_ids, np.memmap)
    second.from_cache = None
    assert first == second and str(first) == str(second)
    for options in (
        {"for_scoring": True},
        {"max_tokens": 99},
        {"overlong": "truncate"},
        {"system_prompt": "s"},
        {"stop_ids": [7]},
        {"prompt_format": "chat"},
    ):
        assert not load(paths, cache_dir=folder, **options)[1].from_cache, options
        assert load(paths, cache_dir=folder, **options)[1].from_cache, options


@pytest.mark.parametrize("for_scoring", [False, True])
def test_data_checks(tmp_path, for_scoring):
    a = ROW
    b = ROW | {"prompt": "ho"}
    swapped = {"prompt": "hi", "chosen": ROW["rejected"], "rejected": ROW["chosen"]}
    same = ROW | {"rejected": ROW["chosen"]}
    rows = [a, b, swapped, same, same, a, ROW | {"chosen": "hellos and more"}]
    dataset, report = pairs(tmp_path, rows, for_scoring=for_scoring)
    assert len(dataset) == 7  # nothing is dropped
    extra = int(for_scoring)  # the line break after the last turn
    chosen = [2, 2, 5, 2, 2, 2, 12]
    rejected = [5, 5, 2, 2, 2, 5, 5]
    found = dataset.response_lengths - extra
    assert found.tolist() == [*map(list, zip(chosen, rejected, strict=True))]
    text = str(report)
    means = [f"{sum(lengths) / 7 + extra:.1f}" for lengths in (chosen, rejected)]
    assert f"chosen {means[0]} tokens on average, rejected {means[1]};" in text
    assert "2 pairs with identical responses" in text and "2 pairs repeating an earlier one" in text
    assert "3 pairs present with their sides exchanged" in text
    assert "chosen is longer in 28.6% of the pairs, rejected in 42.9%" in text
    # of equal conversations the last answer is the response
    twice = {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, GOOD]}
    dataset, report = pairs(tmp_path, [twice], for_scoring=for_scoring)
    assert dataset.response_lengths.tolist() == [[2 + extra] * 2]
    assert "1 row (chosen+rejected 1) -> 1 pair, " in str(report)
    assert "\n  1 pair with identical responses" in str(report)
    text = str(pairs(tmp_path, [a, b], for_scoring=for_scoring)[1])
    assert not any(word in text for word in ("identical", "repeat", "exchanged", "margin", "grade"))
    with pytest.raises(
        ValueError, match="the only row of .* was dropped: 1 empty_response"
    ) as said:
        pairs(tmp_path, [ROW | {"chosen": ""}], for_scoring=for_scoring)
    assert "--max_sequence_tokens" not in str(said.value)  # no longer limit would help


@pytest.mark.parametrize("for_scoring", [False, True])
def test_overlap_of_training_and_evaluation(tmp_path, for_scoring):
    rows = [ROW, ROW | {"prompt": "ho"}, ROW | {"prompt": "ha"}]
    swapped = {"prompt": "hi", "chosen": ROW["rejected"], "rejected": ROW["chosen"]}
    held_out = [rows[1], swapped, ROW | {"chosen": "other"}, ROW | {"prompt": "new"}]
    train, _ = load(write(tmp_path / "a.jsonl", rows), for_scoring=for_scoring)
    evaluation, _ = load(write(tmp_path / "b.jsonl", held_out), for_scoring=for_scoring)
    assert overlap_report(train, evaluation) == (
        "evaluation overlaps with training: 2 of 4 pairs (50.0%, in either order), "
        "2 of 3 prompts (66.7%)"
    )
    other, _ = load(write(tmp_path / "c.jsonl", held_out[3:]), for_scoring=for_scoring)
    assert overlap_report(train, other) is None
    prompt, _ = load(write(tmp_path / "d.jsonl", held_out[2:3]), for_scoring=for_scoring)
    assert "0 of 1 pairs (0.0%, in either order), 1 of 1 prompts" in overlap_report(train, prompt)


def test_render_pair(tmp_path):
    tokenizer = make_tokenizer()
    prompt = "<bos><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render_pair(pair(tmp_path, ROW, tokenizer), tokenizer) == (
        f"{prompt}\n---- chosen: «hello<|im_end|>»\n---- rejected: «he no<|im_end|>»"
    )
    scored = pair(tmp_path, ROW, tokenizer, for_scoring=True)
    assert render_pair(scored, tokenizer, color=True) == (
        f"{prompt}\n---- chosen: \x1b[32mhello<|im_end|>\n\x1b[0m"
        "\n---- rejected: \x1b[32mhe no<|im_end|>\n\x1b[0m"
    )
    long = PairRow(*[TokenRow([1] * 50, [t > 3 for t in range(50)])] * 2, 3, 4, 0.0, (0.0, 0.0))
    assert len(render_pair(long, tokenizer, max_chars=20)) < 250


def test_responses_that_begin_alike_are_shown_in_full(tmp_path):
    """Pairs to score were cut where their ids part: "Assistant: Yes," belonged to the prompt."""
    tokenizer = make_tokenizer("no_template")
    row = {"prompt": "hi:", "chosen": " yes, very", "rejected": " yes, a bit"}
    for for_scoring in (False, True):
        shown = render_pair(pair(tmp_path, row, tokenizer, for_scoring=for_scoring), tokenizer)
        assert shown == (
            "<bos>hi:\n---- chosen: « yes, very<eos>»\n---- rejected: « yes, a bit<eos>»"
        )
        same = pair(tmp_path, row | {"rejected": " yes, very"}, tokenizer, for_scoring=for_scoring)
        assert render_pair(same, tokenizer) == (
            "<bos>hi:\n---- chosen: « yes, very<eos>»\n---- rejected: « yes, very<eos>»"
        )


def test_pairs_that_share_nothing_can_be_shown(tmp_path):
    """To score, "=" + "1" is one token, so that the prompt has none of its own: it crashed."""
    tokenizer = make_tokenizer("no_template", add_bos=False)
    row = {"prompt": "=", "chosen": "1", "rejected": "12"}
    found = pair(tmp_path, row | {"rejected": "1 or"}, tokenizer, for_scoring=True)
    assert found.prompt_length == 0
    assert render_pair(found, tokenizer) == (
        "\n---- chosen: «=1<eos>»\n---- rejected: «=1 or<eos>»"
    )


def test_worker_processes_give_the_same_pairs():
    """What they are sent must survive: settings, tokenizer, template."""
    encoder = pairs_module._PairEncoder(make_tokenizer(), "be brief", "auto", None, max_tokens=99)
    sent = pickle.loads(pickle.dumps(encoder))
    here, there = (
        data._encode_chunk([ROW, ROW | {"chosen": ""}], 5, each) for each in (encoder, sent)
    )
    assert repr(pickle.loads(pickle.dumps(there))) == repr(here)
    assert here.num_units == 1 and here.drops[0][:2] == (6, "empty_response")


def test_two_ranks_get_the_same_pairs(tmp_path):
    write(tmp_path / "a.jsonl", [ROW, ROW | {"prompt": "ho", "margin": 1}, ROW | {"chosen": ""}])
    result = subprocess.run(
        command("tests/run_data.py", tmp_path, "pairs", ranks=2),
        env=environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("rank ")]
    (told,) = {line.partition(": ")[2] for line in lines}
    assert len(lines) == 2 and told.endswith(" 2 pairs")
