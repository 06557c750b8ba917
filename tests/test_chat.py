"""Masks are exact under every kind of chat template, and nothing that a row says is lost."""

import json
import random

import pytest
from tiny import CHAT_TEMPLATE, SPECIAL, make_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from common.chat import ChatTemplate, stop_token_ids
from common.formats import (
    Drop,
    Example,
    as_messages,
    as_tools,
    detect_format,
    parse_prompt,
    parse_row,
)

CUE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# the default system prompt is part of the template, tools and calls are written in its own way
QWEN25 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% else %}{% set system = 'You are helpful.' %}{% endif %}"
    "<|im_start|>system\n{{ system }}"
    "{% if tools %}{{ '\n\n' }}# Tools\n<tools>{% for tool in tools %}{{ '\n' + tool | tojson }}"
    "{% endfor %}{{ '\n' }}</tools>{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}{{ '\n' + m.content if m.content }}"
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
    '{{ "\n" }}<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + CUE
)
# earlier turns lose their thoughts, the last one gets an empty block if it has none
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}"
    "{% set content = m.content %}{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# the date, one call a turn without text, results as JSON text
LLAMA31 = (
    "{{ bos_token }}<|im_start|>system\n\nToday Date: {{ strftime_now('%d %b %Y') }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}<|im_end|>"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|im_start|>assistant\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>'
    "{% elif m.role == 'tool' or m.role == 'ipython' %}<|im_start|>ipython\n\n"
    "{{ m.content | tojson }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
# roles alternate, the system prompt goes into the last user turn, calls need ids of nine characters
MISTRAL = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index %}{% endif %}{% endfor %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% set ns.last = ns.last - 1 %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if not loop.first and messages[loop.index0 - 1].role not in ('assistant', 'tool') %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}[INST] "
    "{% if loop.index == ns.last and system is defined %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('ids must have length 9') }}{% endif %}"
    "{{ call.function | tojson }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
)
# tokens merge from the cue into the answer
MERGING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}={{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant={% endif %}"
)
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3.1": LLAMA31,
    "mistral": MISTRAL,
    "merging": MERGING,
}
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
TOOL_CHAT = [
    {"role": "user", "content": "Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
    },
    {"role": "tool", "content": "31 degrees"},
    {"role": "assistant", "content": "Hot."},
]


def sampled(template, messages, tools=(), **options):
    """(what the engine is given, what it would sample) for every trained stretch, in order."""
    stretches = []
    for ids, mask in template.sequences(
        as_messages(messages, "m"), as_tools(list(tools)), **options
    ):
        assert len(ids) == len(mask) and not mask[0]
        starts = [t for t in range(1, len(ids)) if mask[t] and not mask[t - 1]]
        for start in starts:
            end = next((t for t in range(start, len(ids)) if not mask[t]), len(ids))
            stretches.append((ids[:start], ids[start:end]))
    return stretches


def shown(template, *args, **options):
    tokenizer = template.tokenizer
    return [
        (tokenizer.decode(a), tokenizer.decode(b)) for a, b in sampled(template, *args, **options)
    ]


def make_template(name, **kwargs):
    return ChatTemplate(make_tokenizer(chat_template=TEMPLATES.get(name, name)), kwargs)


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_trained_once_as_it_would_be_sampled(name):
    """P03, P06, P07: against the definition, turn by turn and without any reuse of ids."""
    template = make_template(name)
    tokenizer = template.tokenizer
    stop_ids = stop_token_ids(tokenizer)
    pieces = [
        "12",
        "=1",
        "hello ",
        "\n",
        " é",
        "日本",
        "he",
        "  x",
        "<im",
    ]
    thoughts = "<think>\nso\n</think>\n\n"  # elsewhere than in front Qwen3 loses text
    generator = random.Random(0)
    for _ in range(60):  # more rows than the encoder compares with the plain way by itself
        messages = [{"role": "system", "content": "be brief"}] * generator.randint(0, 1)
        for _ in range(generator.randint(1, 4)):
            for role in ("user", "assistant"):
                text = "a" + "".join(generator.choices(pieces, k=generator.randint(0, 6)))
                text = thoughts * generator.randint(0, 1) + text
                messages.append({"role": role, "content": text})
        expected = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                options = {"tokenize": False}
                prompt = tokenizer.apply_chat_template(
                    messages[:i], add_generation_prompt=True, **options
                )
                text = tokenizer.apply_chat_template(messages[: i + 1], **options)
                prompt_ids, ids = (
                    tokenizer(x, add_special_tokens=False)["input_ids"] for x in (prompt, text)
                )
                if ids[: len(prompt_ids)] != prompt_ids:
                    rest = text.removeprefix(prompt)
                    ids = prompt_ids + tokenizer(rest, add_special_tokens=False)["input_ids"]
                end = next(t for t in range(len(prompt_ids), len(ids)) if ids[t] in stop_ids)
                expected.append((prompt_ids, ids[len(prompt_ids) : end + 1]))
        assert sampled(template, messages) == expected
        assert sampled(template, messages, train_on="last_turn") == expected[-1:]
        (ids, mask), *others = template.sequences(messages, [], train_on="full")
        assert not others and not mask[0] and all(mask[1:])
        assert ids == tokenizer.apply_chat_template(messages, return_dict=False)


def test_thoughts_of_earlier_turns_are_context_nowhere_and_trained_once():
    """P07: Qwen3 strips them from the history, so the row becomes two sequences."""
    template = make_template("qwen3")
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    chat = [{"role": "user", "content": "hi"}, answer]
    first, second = shown(template, chat * 2)
    assert first[1] == second[1] == "<think>\nhm\n</think>\n\nyes<|im_end|>"
    assert "hm" not in second[0] and second[0].count("yes") == 1
    assert not template.notes
    # within one question the thoughts stay, and so does the sequence
    calls = [{"function": {"name": "f", "arguments": {}}}]
    loop = [chat[0], answer | {"tool_calls": calls}, {"role": "tool", "content": "7"}, answer]
    assert len(template.sequences(as_messages(loop, "m"), [])) == 1
    assert shown(template, loop)[1][0].count("hm") == 1


def test_template_kwargs_reach_the_template():
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    ((prompt, target),) = shown(make_template("qwen3", enable_thinking=False), chat)
    assert prompt.endswith("<think>\n\n</think>\n\n") and target == "yes<|im_end|>"
    ((prompt, target),) = shown(make_template("qwen3"), chat)
    assert prompt.endswith("assistant\n") and target == "<think>\n\n</think>\n\nyes<|im_end|>"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_that_the_template_does_not_know_is_written_before_the_answer(key):
    template = make_template("chatml")
    answer = {"role": "assistant", "content": "yes", key: "hm"}
    ((_, target),) = shown(template, [{"role": "user", "content": "hi"}, answer])
    assert target == "<think>\nhm\n</think>\n\nyes<|im_end|>"
    assert "reasoning" in "".join(template.notes)


def test_tools_in_the_templates_own_words():
    template = make_template("qwen2.5")
    first, second = shown(template, TOOL_CHAT, [TOOL])
    assert first[0].startswith("<|im_start|>system\nYou are helpful.\n\n# Tools\n<tools>\n{")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    assert first[0].endswith("assistant\n") and first[1] == call
    assert "user\n<tool_response>\n31 degrees\n</tool_response><|im_end|>" in second[0]
    assert not template.notes
    first, second = shown(make_template("llama3.1"), TOOL_CHAT, [TOOL])
    assert first[1] == '{"name": "weather", "parameters": {"city": "Rome"}}<|im_end|>'
    assert 'ipython\n\n"31 degrees"' in second[0]
    template = make_template("mistral")
    first, second = shown(template, TOOL_CHAT, [TOOL])
    assert first[1].startswith("[TOOL_CALLS] [") and second[0].endswith("[/TOOL_RESULTS]")
    assert template.notes == {"tools are written into the system turn as <tools> (Hermes)"}


NO_TOOLS = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + CUE
)


def test_tools_as_text_where_the_template_has_no_place_for_them():
    """Tools were dropped by the template without a word; a default system prompt must survive."""
    template = make_template(NO_TOOLS)
    two = [TOOL_CHAT[0], TOOL_CHAT[1] | {"content": "Wait."}, TOOL_CHAT[2], *TOOL_CHAT[2:]]
    first, second = shown(template, two, [TOOL])
    assert first[0].startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    inside = first[0].partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(inside) == {"type": "function", "function": TOOL}
    assert first[1].startswith("Wait.\n<tool_call>\n") and first[1].endswith("<|im_end|>")
    called = first[1].partition("<tool_call>")[2].partition("</tool_call>")[0]
    assert json.loads(called) == {"name": "weather", "arguments": {"city": "Rome"}}
    response = "<tool_response>\n31 degrees\n</tool_response>"
    assert f"<|im_start|>user\n{response}\n{response}<|im_end|>" in second[0]
    assert len(template.notes) == 3
    own = [{"role": "system", "content": "Mine."}, *two]
    assert shown(template, own, [TOOL])[0][0].startswith("<|im_start|>system\nMine.\n\n# Tools\n")


def test_tools_go_into_the_first_user_turn_if_there_is_no_system_turn():
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + CUE
    )
    prompt = shown(make_template(template), TOOL_CHAT, [TOOL])[0][0]
    assert prompt.startswith("<|im_start|>user\n# Tools\n") and "\n\nRome?<|im_end|>" in prompt


def test_calls_as_json_text_where_the_template_prints_them_as_they_are():
    template = QWEN25.replace("call.arguments | tojson", "call.arguments")
    assert '"arguments": {"city": "Rome"}' in shown(make_template(template), TOOL_CHAT)[0][1]


def test_null_filled_arguments_are_removed():
    """P08: columnar files give every call the arguments of all the others, as nulls."""
    arguments = {"city": "Rome", "zip": None, "deep": {"a": None, "b": [{"c": None, "d": 1}]}}
    calls = [{"function": {"name": "weather", "arguments": arguments}, "id": None}]
    chat = [TOOL_CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls, "name": None}]
    ((_, target),) = shown(make_template("qwen2.5"), chat)
    assert '{"city": "Rome", "deep": {"b": [{"d": 1}]}}' in target
    calls[0]["function"]["arguments"] = json.dumps({"city": None})  # written by hand: meant
    assert '{"city": null}' in shown(make_template("qwen2.5"), chat)[0][1]
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": None}}}
    assert as_tools([tool])[0]["function"]["parameters"] == {
        "properties": {"a": {"type": "string"}}
    }


def drop(template, messages, tools=(), **options):
    with pytest.raises(Drop) as caught:
        sampled(make_template(template), messages, tools, **options)
    return caught.value.reason, caught.value.detail


def test_rows_that_a_template_cannot_write_are_dropped_with_its_words():
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    assert drop("mistral", [user, user, answer]) == (
        "template_error",
        "the chat template says: roles must alternate user/assistant",
    )
    calls = [*TOOL_CHAT[1]["tool_calls"] * 2]
    assert "single tool-calls" in drop("llama3.1", [user, answer | {"tool_calls": calls}])[1]
    # the system prompt is there only while nothing follows the user's turn
    vanishes = MISTRAL.replace("loop.index == ns.last", "loop.last")
    assert (
        drop(vanishes, [{"role": "system", "content": "S"}, user, answer])[0] == "template_prefix"
    )
    # text next to a call
    lost = drop("llama3.1", [user, answer | {"tool_calls": calls[:1]}])
    assert lost == ("template_loses_text", "the template does not write 'yes'")
    ignored = CHAT_TEMPLATE.replace("in messages %}", "in messages if m.role != 'system' %}")
    assert drop(ignored, [{"role": "system", "content": "Rules"}, user, answer])[0] == lost[0]


@pytest.mark.parametrize("token", SPECIAL)
def test_special_tokens_spelled_in_text_are_not_control_tokens(token):
    """Such a row ended a turn in its middle, and the rest of it was masked silently."""
    for i in range(2):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
        messages[i]["content"] += token
        assert drop("chatml", messages) == ("special_token_in_text", f"the text spells {token!r}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT_TEMPLATE.replace("<|im_end|>", ""), "learn to stop"),
        (
            CHAT_TEMPLATE.replace("assistant\n{% endif", "Assistant\n{% endif"),
            r"template_prefix: the turn's prompt ends '.*Assistant\\n', the template writes "
            r"'.*assistant\\nParis",
        ),
        ("{{ raise_exception('never') }}<|im_end|>", "the chat template says: never"),
    ],
)
def test_templates_that_cannot_be_trained_on_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        make_template(template).check()


@pytest.mark.parametrize("name", TEMPLATES)
def test_known_templates_pass_the_check(name):
    make_template(name).check()


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
CALL = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2, "wet": True}}}
TWO_CALLS = {"tool_calls": [CALL, CALL]}
# what is said beside calls becomes a block of its own
TWO_BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{% if m.content %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}" + CUE
)


def test_a_stop_token_inside_a_turn_drops_the_row():
    """The target ended at the first stop token and the rest of the turn was masked silently."""
    reason = "stop_token_inside_turn"
    found = drop(TWO_BLOCKS, [USER, ANSWER | {"tool_calls": [CALL]}])
    assert found[0] == reason and "weather" in found[1]
    assert len(shown(make_template(TWO_BLOCKS), [USER, ANSWER | {"content": "", **TWO_CALLS}])) == 1
    completed = CHAT_TEMPLATE.replace("<|im_end|>", "><|im_end|>")
    assert drop(completed, [USER, {"role": "assistant", "content": "x<|im_end|"}])[0] == reason
    named = CHAT_TEMPLATE.replace("<|im_end|>", "{{ m.name }}<|im_end|>")
    assert drop(named, [USER, ANSWER | {"name": "<|im_end|>"}])[0] == "special_token_in_text"
    # a stop id that is an ordinary word
    tokenizer = make_tokenizer()
    template = ChatTemplate(tokenizer, stop_ids=tokenizer("hello")["input_ids"][1:])
    with pytest.raises(Drop, match=reason):
        sampled(template, [USER, ANSWER | {"content": "oh hello there"}])
    assert len(sampled(template, [USER, ANSWER])) == 1


@pytest.mark.parametrize(
    ("normalizer", "content"),
    [("Lowercase", "b<|IM_END|>c"), ("Lowercase", "b<|IM_END|>"), ("NFKC", "b＜|im_end|＞")],
)
def test_special_tokens_that_the_tokenizer_makes_of_text_drop_the_row(normalizer, content):
    """The text does not spell them, so they ended the target like the template's own."""
    tokenizer = make_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["normalizer"] = {"type": normalizer}
    for token in state["added_tokens"]:
        token["normalized"] = True
    normalizing = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token="<eos>",
        bos_token="<bos>",
        chat_template=CHAT_TEMPLATE,
    )
    with pytest.raises(Drop, match="stop_token_inside_turn"):
        sampled(ChatTemplate(normalizing), [USER, ANSWER | {"content": content}])
    assert shown(ChatTemplate(normalizing), [USER, ANSWER])[0][1] == "yes<|im_end|>"


def test_words_of_the_template_after_every_turn_are_no_reason_to_drop():
    template = CHAT_TEMPLATE.replace("<|im_end|>\n", "<|im_end|>\n{{ '---' }}<eos>\n")
    first, second = shown(make_template(template), [USER, ANSWER] * 2)
    assert first[1] == second[1] == "yes<|im_end|>"


@pytest.mark.parametrize("train_on", ["all_turns", "full"])
@pytest.mark.parametrize(
    ("written", "answer", "lost"),
    [
        # only the text after the last </think> was compared
        ("{{ m.content.split('</think>')[-1] }}", {"content": "<think>so</think>yes"}, "so"),
        # the template shows it only without tools
        ("{{ m.content }}{{ m.reasoning_content if not m.name }}", {"name": "a"}, "hm"),
        # only the names of calls were compared, and not how often
        (
            "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
            "{% endif %}",
            TWO_CALLS,
            "",
        ),
        (
            "{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name ~ c.function.arguments.city ~ c.function.arguments.zqKey }}"
            "{% endfor %}",
            {"tool_calls": [CALL]},
            "",
        ),
    ],
)
def test_what_a_template_leaves_out_of_a_trained_turn_drops_the_row(
    written, answer, lost, train_on
):
    """Thoughts, arguments and repeated calls went missing from the targets without a word."""
    template = CHAT_TEMPLATE.replace("{{ m['content'] }}", written)
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"} | answer
    if "reasoning_content" not in written:
        del answer["reasoning_content"]
    reason, detail = drop(template, [USER, answer], train_on=train_on)
    assert reason == "template_loses_text" and lost in detail


def test_arguments_are_found_in_every_way_to_write_them():
    arguments = {"q": 'say "é", it\'s\n\\', "n": 1e-05, "b": True, "deep": [{"x": [None, "", -3]}]}
    calls = [{"function": {"name": "f", "arguments": arguments}}] * 2
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    python = CHAT_TEMPLATE.replace(
        "<|im_end|>",
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}<{{ k }}>"
        "{{ v if v is string else v | tojson }}{% endfor %}{% endfor %}<|im_end|>",
    )
    quoted = python.replace("v | tojson", "v").replace(
        "v if v is string",
        "v | replace('\\\\', '\\\\\\\\') | replace(\"'\", \"\\\\'\") | replace('\\n', '\\\\n')"
        " if v is string",
    )
    as_text = QWEN25.replace("call.arguments | tojson", "call.arguments")
    for template in (QWEN25, QWEN3, CHAT_TEMPLATE, as_text, python, quoted):
        assert len(shown(make_template(template), chat)) == 1


def test_short_texts_of_the_context_are_missed_too():
    """A short system prompt was found by chance in other words; tool results were not compared."""
    no_system = CHAT_TEMPLATE.replace("in messages %}", "in messages if m.role != 'system' %}")
    template = make_template(no_system)
    for system in ("a", "user"):
        for train_on in ("all_turns", "full"):
            with pytest.raises(Drop, match="template_loses_text"):
                sampled(template, [{"role": "system", "content": system}, USER, ANSWER])
            with pytest.raises(Drop, match="template_loses_text"):
                chat = [USER, ANSWER, {"role": "system", "content": system}, USER, ANSWER]
                sampled(template, chat, train_on=train_on)
    named = CHAT_TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m.content if m.role != 'tool' or m.name }}"
    )
    result = {"role": "tool", "content": "31"}
    assert drop(named, [USER, ANSWER, result, ANSWER])[0] == "template_loses_text"
    assert len(shown(make_template(named), [USER, ANSWER, result | {"name": "f"}, ANSWER])) == 2
    # escaped, and once more later on
    quoted = {"role": "tool", "content": 'a "b"'}
    chat = [*TOOL_CHAT[:2], quoted, ANSWER, USER | {"content": 'a "b"?'}, ANSWER]
    assert len(shown(make_template("llama3.1"), chat)) == 3


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"trainable": False}])
def test_turns_that_are_marked_are_not_trained(mark):
    """OpenAI's weight 0 and its like were ignored: bad answers were trained."""
    bad = {"role": "assistant", "content": "bad"} | mark
    template = make_template("chatml")
    ((prompt, target),) = shown(template, [USER, bad, USER, ANSWER | {"weight": 1}])
    assert "bad<|im_end|>" in prompt and target == "yes<|im_end|>"
    ((_, target),) = shown(template, [USER, ANSWER, USER, bad], train_on="last_turn")
    assert target == "yes<|im_end|>"
    assert drop("chatml", [USER, bad])[0] == "no_target"
    assert drop("chatml", [USER, bad], train_on="full")[0] == "untrained_turn_in_full"
    assert len(shown(template, [USER, ANSWER | {next(iter(mark)): None}])) == 1
    for weight in (0.5, "0", -1, [1]):
        assert drop("chatml", [USER, ANSWER | {"weight": weight}])[0] == "bad_weight"
    told = template.sequences(as_messages([USER, bad, USER, ANSWER], "m"), [], num_context=2)
    assert len(told) == 1
    called = {"from": "function_call", "value": '{"name": "f"}'} | mark
    assert as_messages([USER, ANSWER, called], "m")[1]["trained"] is False
    assert parse_prompt({"prompt": [USER, bad]})[1][1] == {"role": "assistant", "content": "bad"}


@pytest.mark.parametrize("null", [None, float("nan"), float("inf")])
def test_missing_values_of_pandas_are_null(null):
    """NaN was trained as the word."""
    row = {"instruction": "add", "input": null, "output": "x", "history": null, "tools": null}
    assert parse_row(row, "instruction+output").prompt == "add"
    assert parse_row({"question": "a", "answer": null}, "question+answer").completion == ""
    assert parse_row({"messages": null}, "messages").completion == []
    assert detect_format({"messages": null, "prompt": "a", "completion": "b"}) == (
        "prompt+completion"
    )
    assert parse_prompt({"prompt": null})[1] == ""


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"prompt": "a", "completion": "b"}, "sua"),
        ({"prompt": "", "completion": "b"}, "sua"),  # dropped later: empty_turn
        ({"prompt": "", "completion": [USER, ANSWER]}, "sua"),
        ({"prompt": [USER], "completion": [ANSWER]}, "sua"),
        ({"prompt": "a", "chosen": "b"}, "sua"),
        ({"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER]}, "sua"),
        ({"question": "a", "answer": "b"}, "sua"),
        ({"instruction": "a", "output": "b"}, "sua"),
        ({"text": [USER, ANSWER]}, "sua"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, USER]}, "sua"),
        ({"conversations": [USER], "chosen": ANSWER}, "sua"),
        ({"messages": [{"role": "system", "content": "S"}, USER, ANSWER]}, "sua"),
    ],
)
def test_the_system_column_counts_in_every_format(row, roles):
    """It was ignored beside prompt, question and chosen."""
    row = row | {"system": "S"}
    example = parse_row(row, detect_format(row))
    assert not isinstance(example.prompt, str) and not isinstance(example.completion, str)
    turns = [*example.prompt, *example.completion]
    assert "".join(turn["role"][0] for turn in turns) == roles
    assert turns[0]["content"] == "S" and example.completion[-1]["role"] == "assistant"
    if row.get("prompt") or "question" in row:
        asked = parse_prompt(row)[1]
        assert not isinstance(asked, str) and asked[0] == {"role": "system", "content": "S"}


def test_the_system_column_has_no_place_in_whole_texts():
    assert parse_row({"text": "a", "system": "S"}, "text").completion == "a"
    assert parse_row({"question": "a", "answer": "b", "system": " "}, "question+answer") == (
        Example("a", "b")
    )


def test_functions_are_tools_and_empty_ones_are_none():
    """OpenAI's older column was ignored; "null" and the like dropped the row."""
    row = {"messages": [USER, ANSWER], "functions": [TOOL]}
    expected = [{"type": "function", "function": TOOL}]
    for tools in (None, "null", "[]", "{}", {}, [], [None], [{}], [{"name": None}]):
        assert as_tools(tools) == []
        assert parse_row(row | {"tools": tools}, "messages").tools == expected
    assert parse_row(row | {"tools": [{"name": "f"}]}, "messages").tools != expected


def test_system_turns_without_text_are_none():
    """They replaced the template's default system prompt, and kept --system_prompt away."""
    for content in (None, "", " \n"):
        chat = [{"role": "system", "content": content}, USER, ANSWER]
        assert as_messages(chat, "m") == [USER, ANSWER]
        assert "You are helpful." in shown(make_template("qwen2.5"), chat)[0][0]


def test_the_terminator_is_looked_up_as_the_template_is_used():
    """Templates that need their arguments, or break, were said to write no special token."""
    needs = "{% if not mode %}{{ raise_exception('which mode?') }}{% endif %}" + CHAT_TEMPLATE
    make_template(needs, mode="x").check()
    with pytest.raises(ValueError, match="the chat template says: which mode"):
        make_template(needs).check()
    with pytest.raises(ValueError, match="the chat template says: TypeError"):
        make_template("{{ 1 + 'a' }}" + CHAT_TEMPLATE).check()
    with pytest.raises(ValueError, match="rag, tool_use, but no default"):
        ChatTemplate(make_tokenizer(chat_template={"tool_use": CHAT_TEMPLATE, "rag": ""}))


def test_tool_results_name_their_calls():
    """Mistral's results need the ids of their calls; without them they became user turns."""
    template = MISTRAL.replace(
        "[TOOL_RESULTS] ",
        "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('results need ids') }}{% endif %}[TOOL_RESULTS] {{ m.tool_call_id }} ",
    ).replace("{{ call.function", "{{ call.id }} {{ call.function")
    call, result = TOOL_CHAT[1], TOOL_CHAT[2]
    twice = call | {"tool_calls": call["tool_calls"] * 2}
    chat = [USER, call, result, twice, result, result, ANSWER]
    *_, (prompt, _) = shown(make_template(template), chat)
    assert prompt.count("[TOOL_RESULTS]") == 3
    for number in (1, 2, 3):
        assert prompt.count(f"call0000{number}") == 2
    named = call | {"tool_calls": [call["tool_calls"][0] | {"id": f"given{i:04d}"} for i in (1, 2)]}
    chat = [USER, named, result | {"tool_call_id": "given0002"}, result, ANSWER]
    assert "[TOOL_RESULTS] given0001" in shown(make_template(template), chat)[-1][0]
