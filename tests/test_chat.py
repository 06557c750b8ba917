"""Masks are exact under every kind of chat template, and nothing that a row says is lost."""

import json
import random

import pytest
from tiny import CHAT_TEMPLATE, SPECIAL, make_tokenizer

from common.chat import ChatTemplate, stop_token_ids
from common.formats import Drop, as_messages, as_tools

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
        "<think>\nso\n</think>\n\n",
        "  x",
        "<im",
    ]
    generator = random.Random(0)
    for _ in range(60):  # more rows than the encoder compares with the plain way by itself
        messages = [{"role": "system", "content": "be brief"}] * generator.randint(0, 1)
        for _ in range(generator.randint(1, 4)):
            for role in ("user", "assistant"):
                text = "a" + "".join(generator.choices(pieces, k=generator.randint(0, 6)))
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
        ("{{ raise_exception('never') }}<|im_end|>", "learn to stop"),
    ],
)
def test_templates_that_cannot_be_trained_on_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        make_template(template).check()


@pytest.mark.parametrize("name", TEMPLATES)
def test_known_templates_pass_the_check(name):
    make_template(name).check()
