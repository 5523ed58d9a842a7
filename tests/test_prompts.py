"""Prompt encoding: one BOS, templates only where they belong, exact truncation, text that never becomes control ids."""

from __future__ import annotations

import hashlib
import os
import string
from functools import lru_cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvbench.errors import InputError, SampleError
from kvbench.prompts import Prompt, PromptEncoder
from kvbench.tasks.sample import Sample

SPECIALS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
LINES = [
    "The harbor was closed in March 1911, they say; the ships lay still.",
    "Der Hafen wurde geschlossen: größere Schiffe blieben draußen.",
    "港は一九一一年三月に閉鎖された。船は沖に停泊した。",
    "Порт был закрыт в марте 1911 года 😀 🚢 é ü ñ",
    "Question: What was closed? Answer: the harbor, ### Summary:",
]
BODY = "{{ '<|im_start|>user\n' + message['content'] + '<|im_end|>\n' }}"
TEMPLATE = (
    "{% for message in messages %}" + BODY + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATE_BOS = "{{ bos_token }}" + TEMPLATE
TEMPLATE_STRIP = TEMPLATE.replace("message['content']", "message['content'] | trim")
FLAGS = {"qasper": True, "trec": False, "lcc": False, "samsum": False}  # may the task's prompt be wrapped?
BPE, UNIGRAM, METASPACE_BPE = "bytes", "unigram", "metaspace"


@lru_cache
def train(kind: str) -> str:
    if kind == BPE:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet)
    else:
        model = models.Unigram() if kind == UNIGRAM else models.BPE(unk_token="<unk>")
        tokenizer = Tokenizer(model)
        scheme = "always" if kind == UNIGRAM else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        alphabet = sorted({*"".join(LINES), *string.printable, "▁"} - {" "})
        make = trainers.UnigramTrainer if kind == UNIGRAM else trainers.BpeTrainer
        unknown = {"unk_token": "<unk>"} if kind == UNIGRAM else {}
        trainer = make(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, **unknown)
    tokenizer.train_from_iterator(LINES * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return tokenizer.to_str()


def make(kind: str = BPE, template: str | None = TEMPLATE, **kwargs) -> PreTrainedTokenizerFast:
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "extra_special_tokens": SPECIALS[3:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(train(kind)), **named, **kwargs)
    tokenizer.chat_template = template
    return tokenizer


def sample(context: str = "The ships lay still.", question: str = "\nWhat was closed?", **kwargs) -> Sample:
    return Sample(id="s", context=context, question=question, answers=kwargs.pop("answers", ("harbor",)), **kwargs)


def ids_of(prompt: Prompt) -> list[int]:
    return [*prompt.context_ids, *prompt.question_ids]


# ---- C5: one BOS, the right template ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BPE, UNIGRAM, METASPACE_BPE])
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE_BOS], ids=["template", "template_prints_bos"])
@pytest.mark.parametrize("task", FLAGS)
def test_one_bos_and_markers_only_where_they_belong(kind, template, task):
    tokenizer = make(kind, template)
    prompt = PromptEncoder(tokenizer).encode(sample(instruction="Read: "), FLAGS[task], 10_000)
    ids = ids_of(prompt)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    markers = [ids.count(tokenizer.convert_tokens_to_ids(marker)) for marker in ("<|im_start|>", "<|im_end|>")]
    assert markers == ([2, 1] if FLAGS[task] else [0, 0])
    assert (prompt.tail_tokens > 0) is FLAGS[task]


def test_no_bos_where_the_tokenizer_adds_none():
    tokenizer = make(BPE)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    ids = ids_of(PromptEncoder(tokenizer).encode(sample(), True, 1000))
    assert tokenizer.bos_token_id not in ids


def test_several_default_prefix_tokens_come_once():
    tokenizer = make(BPE, "<s><|im_end|>" + TEMPLATE)
    pair = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <|im_end|> $A", special_tokens=pair
    )
    encoder = PromptEncoder(tokenizer)
    opening = [identity for _, identity in pair]
    for chat in (True, False):
        context = encoder.encode(sample(), chat, 1000).context_ids
        assert list(context[:2]) == opening and context.count(opening[0]) == 1


def test_a_task_or_a_setting_can_refuse_the_template():
    tokenizer = make()
    assert PromptEncoder(tokenizer).effective_chat(True)
    assert not PromptEncoder(tokenizer).effective_chat(False)
    assert not PromptEncoder(tokenizer, chat=False).effective_chat(True)
    plain = PromptEncoder(make(template=None))
    assert not plain.effective_chat(True)
    assert plain.encode(sample(), True, 100).tail_tokens == 0


def test_template_hash_follows_template_and_kwargs():
    empty = hashlib.sha256(b"").hexdigest()
    first, other = PromptEncoder(make()), PromptEncoder(make(template=TEMPLATE_BOS))
    kwargs = PromptEncoder(make(), template_kwargs={"enable_thinking": False})
    assert first.template_sha256(False) == empty
    assert len({empty, first.template_sha256(True), other.template_sha256(True), kwargs.template_sha256(True)}) == 4


@pytest.mark.parametrize("date", ["{{ date_string }}", "{{ strftime_now('%Y') }}"])
def test_rendering_does_not_depend_on_today(date):
    prompt = PromptEncoder(make(template=date + TEMPLATE)).encode(sample(), True, 1000)
    assert "2024" in prompt.text


def test_template_kwargs_reach_the_template():
    template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}No thoughts.{% endif %}"
    encoder = PromptEncoder(make(template=template), template_kwargs={"enable_thinking": False})
    assert encoder.encode(sample(), True, 1000).text.endswith("No thoughts.")


@pytest.mark.parametrize("template", ["no message", "{{ messages[0].content }}" * 2, "{{ raise_exception('no') }}"])
def test_a_template_that_cannot_be_split_is_an_input_error(template):
    with pytest.raises(InputError, match=r"model\.chat_template"):
        PromptEncoder(make(template=template)).encode(sample(), True, 1000)


# ---- segments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BPE, UNIGRAM, METASPACE_BPE])
@pytest.mark.parametrize("chat", [True, False])
def test_context_ids_do_not_depend_on_the_question(kind, chat):
    encoder = PromptEncoder(make(kind))
    first = encoder.encode(sample(question=" What was closed?"), chat, 1000)
    second = encoder.encode(sample(question="ships? Answer:"), chat, 1000)
    assert first.context_ids == second.context_ids
    assert first.question_ids == encoder.question_ids(" What was closed?", "", chat)


@pytest.mark.parametrize("kind", [UNIGRAM, METASPACE_BPE])
@pytest.mark.parametrize("chat", [True, False])
def test_no_blank_at_the_start_of_later_segments(kind, chat):
    tokenizer = make(kind)
    prompt = PromptEncoder(tokenizer).encode(
        sample(context="closed:", question="harbor", instruction="The", answer_prefix="March"), chat, 1000
    )
    shown = tokenizer.decode(ids_of(prompt), skip_special_tokens=True)
    assert "Theclosed:harbor" in shown and shown.endswith("\nMarch" if chat else "harborMarch")


def test_a_prompt_in_one_piece_begins_as_the_tokenizer_begins_it():
    for kind in (BPE, UNIGRAM, METASPACE_BPE):
        tokenizer = make(kind)
        prompt = PromptEncoder(tokenizer).encode(sample(instruction="Read: "), False, 1000)
        assert list(prompt.context_ids) == tokenizer.encode("Read: The ships lay still.")


def test_answer_prefix_stands_after_the_template_tail():
    encoder = PromptEncoder(make())
    prompt = encoder.encode(sample(answer_prefix=" The answer is"), True, 1000)
    assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n The answer is")
    question = len(encoder.question_ids("\nWhat was closed?", "", False))
    assert prompt.tail_tokens == len(prompt.question_ids) - question


def test_count_is_the_untruncated_length():
    encoder = PromptEncoder(make())
    for chat in (True, False):
        assert encoder.count(sample(), chat) == len(ids_of(encoder.encode(sample(), chat, 1000)))


def test_a_template_that_strips_is_followed():
    encoder = PromptEncoder(make(template=TEMPLATE_STRIP))
    prompt = encoder.encode(sample(context=" The ships.", question=" What? \n", instruction="\n Read:"), True, 1000)
    assert prompt.text == "<s><|im_start|>user\nRead: The ships. What?<|im_end|>\n<|im_start|>assistant\n"
    kept = encoder.encode(sample(context=" The ships.", question=" What? \n", instruction="\n Read:"), False, 1000)
    assert kept.text == "<s>\n Read: The ships. What? \n"


# ---- C13: contexts that contain separators and markers -------------------------------------------------------------

HARD = [
    "ends in ###",
    "#",
    "ends in a marker <|im_start|>",
    "<|im_end|>\n<|im_start|>assistant\n",
    "</s><s>",
    "white space \n\n  ",
    " leading",
    "\n",
    "{{ messages }} {% raise %}",
]


@pytest.mark.parametrize("context", HARD)
@pytest.mark.parametrize("chat", [True, False])
def test_context_and_question_round_trip(context, chat):
    tokenizer = make()
    encoder = PromptEncoder(tokenizer)
    for question in ("", "# What <|im_start|>?", "\n"):
        prompt = encoder.encode(sample(context=context, question=question, instruction="<s>Read: "), chat, 1000)
        head, tail = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n") if chat else ("", "")
        assert prompt.text == f"<s>{head}<s>Read: {context}{question}{tail}"
        assert prompt.question_ids
        if question or chat:
            assert tokenizer.decode(prompt.context_ids) == f"<s>{head}<s>Read: {context}"
            assert tokenizer.decode(prompt.question_ids) == f"{question}{tail}"


@pytest.mark.parametrize("kind", [BPE, UNIGRAM, METASPACE_BPE])
@pytest.mark.parametrize("obeys", [True, False], ids=["splits_special", "always_parses_special"])
def test_text_never_becomes_control_ids(kind, obeys, monkeypatch):
    tokenizer = make(kind)
    if not obeys:  # a tokenizer that parses special tokens whatever it is told
        call = PreTrainedTokenizerFast.__call__
        parse = {"split_special_tokens": False}
        monkeypatch.setattr(
            PreTrainedTokenizerFast, "__call__", lambda self, text, **kw: call(self, text, **{**kw, **parse})
        )
    tricky = sample(
        context="a</s>b<|im_end|>", question="<|im_start|>", instruction="<s>", answer_prefix="</s><|im_end|>"
    )
    encoder = PromptEncoder(tokenizer)
    control = [tokenizer.convert_tokens_to_ids(token) for token in SPECIALS if token != "<unk>"]
    ids = ids_of(encoder.encode(tricky, False, 1000))
    assert ids[0] == tokenizer.bos_token_id and not set(ids[1:]) & set(control)
    cut = encoder.encode(sample(context="x</s> " * 200, question="?"), False, 50)
    assert len(ids_of(cut)) == 50 and not set(ids_of(cut)[1:]) & set(control)


def test_half_an_emoji_is_replaced():
    half = "😀".encode()[:2].decode("utf-8", "surrogateescape")
    prompt = PromptEncoder(make()).encode(sample(context=f"ship {half}", question="\ud83d"), False, 100)
    assert prompt.text == "<s>ship \ufffd\ufffd\ufffd"


def test_empty_question_moves_the_last_context_id():
    encoder = PromptEncoder(make())
    whole = encoder.encode(sample(question="x"), False, 100).context_ids
    prompt = encoder.encode(sample(question=""), False, 100)
    assert (*prompt.context_ids, *prompt.question_ids) == whole and len(prompt.question_ids) == 1
    bare = make()
    bare.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    with pytest.raises(SampleError, match="empty"):
        PromptEncoder(bare).encode(sample(context="", question=""), False, 100)


def test_empty_context():
    prompt = PromptEncoder(make()).encode(sample(context=""), False, 100)
    assert prompt.text == "<s>\nWhat was closed?" and len(prompt.context_ids) == 1


# ---- C6: truncation ------------------------------------------------------------------------------------------------

WORDS = ["größere", "船", "😀", "harbor", "Порт", "é"]
C6 = Sample(
    id="c6",
    instruction="You will read a long report; answer then: ",
    context=" ".join(f"{WORDS[i % len(WORDS)]}{i % 7}" for i in range(900)),
    question="\nWhat was the name of the harbor that they closed in 1911?",
    answers=("船1",),
)


@pytest.mark.parametrize("kind", [BPE, UNIGRAM, METASPACE_BPE])
@pytest.mark.parametrize("chat", [True, False])
def test_truncation_is_exact_and_keeps_the_question(kind, chat):
    encoder = PromptEncoder(make(kind))
    limit = 256 - 40
    full = encoder.encode(C6, chat, 10**6)
    prompt = encoder.encode(C6, chat, limit)
    assert len(ids_of(full)) > limit and full.truncated_tokens == 0 and full.answer_survived is None
    assert len(ids_of(prompt)) == limit
    assert prompt.question_ids == full.question_ids == encoder.question_ids(C6.question, "", chat)
    assert prompt.truncated_tokens == len(ids_of(full)) - limit
    # ids are the original's first and last: nothing was decoded and encoded again
    removed, kept = prompt.truncated_tokens, len(prompt.context_ids)
    start = next(
        i for i in range(kept + 1) if full.context_ids[:i] + full.context_ids[i + removed :] == prompt.context_ids
    )
    instruction = len(encoder.encode(sample(context="", instruction=C6.instruction), chat, 10**6).context_ids)
    document = kept - instruction
    # the shift allows for ids that are equal on both sides of the seam
    assert abs(start - (instruction + (document + 1) // 2)) <= 2
    assert C6.instruction.rstrip(": ") in prompt.text and prompt.answer_survived is True


def test_truncation_halves_on_ids():
    encoder = PromptEncoder(make())
    body = sample(context="".join(chr(ord("a") + i % 26) + " " for i in range(300)), question="?", instruction="I: ")
    full, room = encoder.encode(body, False, 10**6), 40
    fixed = len(encoder.encode(sample(context="", instruction="I: ", question="?"), False, 100).context_ids)
    for kept in (0, 1, 2, 7, 30):
        prompt = encoder.encode(body, False, fixed + kept + 1)
        left = fixed + (kept + 1) // 2
        assert prompt.context_ids == full.context_ids[:left] + full.context_ids[len(full.context_ids) - kept // 2 :]
    assert len(ids_of(encoder.encode(body, False, room))) == room


def test_prompt_that_just_fits_is_not_cut():
    encoder = PromptEncoder(make())
    length = encoder.count(C6, True)
    assert encoder.encode(C6, True, length).truncated_tokens == 0
    assert encoder.encode(C6, True, length - 1).truncated_tokens == 1


def test_an_id_across_the_border_belongs_to_the_instruction():
    tokenizer = make()
    encoder = PromptEncoder(tokenizer)
    # "harbor" is one id in this tokenizer; the border between instruction and document cuts it
    assert len(tokenizer.encode(" harbor", add_special_tokens=False)) == 1
    split = sample(instruction="the har", context="bor" + " ships" * 100, question="?")
    prompt = encoder.encode(split, False, 6)
    assert prompt.text.startswith("<s>the harbor") and len(ids_of(prompt)) == 6


def test_nothing_but_the_document_is_cut():
    encoder = PromptEncoder(make())
    with pytest.raises(SampleError, match="does not fit"):
        encoder.encode(C6, True, 20)


def test_reserved_question_tokens_give_equal_contexts():
    encoder = PromptEncoder(make())
    long, short = "\nWhat was closed in March, they say?", "\nWhat?"
    reserve = max(len(encoder.question_ids(text, "", True)) for text in (long, short))
    prompts = [
        encoder.encode(sample(context=C6.context, question=text), True, 200, reserve_question_tokens=reserve)
        for text in (long, short)
    ]
    assert prompts[0].context_ids == prompts[1].context_ids
    assert len(ids_of(prompts[0])) == 200 > len(ids_of(prompts[1]))


@pytest.mark.parametrize(
    ("depth", "answer", "survived"),
    [(0.0, "NEEDLE", True), (0.5, "NEEDLE", False), (0.99, "NEEDLE", True), (0.5, "absent", None)],
)
def test_answer_survived(depth, answer, survived):
    words = ["ship"] * 600
    words[int(depth * 600)] = "NEEDLE"
    prompt = PromptEncoder(make()).encode(sample(context=" ".join(words), answers=(answer, "")), False, 100)
    assert prompt.answer_survived is survived


def test_a_slow_tokenizer_is_refused_only_where_offsets_are_needed(monkeypatch):
    encoder = PromptEncoder(make())
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", property(lambda self: False))
    assert encoder.encode(C6, False, 10**6).truncated_tokens == 0
    with pytest.raises(InputError, match="fast"):
        encoder.encode(C6, False, 100)


# ---- LongBench's own truncation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [100, 101])
@pytest.mark.parametrize("chat", [True, False])
def test_official_truncation(length, chat):
    tokenizer = make()
    encoder = PromptEncoder(tokenizer)
    bare = C6.instruction + C6.context + C6.question
    ids = tokenizer.encode(bare)
    half = length // 2
    text = tokenizer.decode(ids[:half], skip_special_tokens=True)
    text += tokenizer.decode(ids[-half:], skip_special_tokens=True)
    prompt = encoder.encode(C6, chat, 10**6, truncation="official", official_max_length=length)
    head, tail = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n") if chat else ("", "")
    assert prompt.text == f"<s>{head}{text}{tail}"
    assert prompt.truncated_tokens == len(ids) - 2 * half
    assert tokenizer.decode(prompt.question_ids) == C6.question + tail


def test_official_truncation_leaves_short_prompts_alone():
    encoder = PromptEncoder(make())
    plain = encoder.encode(C6, True, 10**6)
    assert encoder.encode(C6, True, 10**6, truncation="official", official_max_length=10**6) == plain


def test_official_truncation_errors():
    encoder = PromptEncoder(make())
    with pytest.raises(SampleError, match=r"model\.official_max_length"):
        encoder.encode(C6, True, 1000, truncation="official")
    with pytest.raises(SampleError, match="question"):
        encoder.encode(C6, True, 1000, truncation="official", official_max_length=10)


def test_newline_ids_and_decode():
    tokenizer = make()
    encoder = PromptEncoder(tokenizer)
    assert encoder.newline_ids() == {tokenizer.encode("\n", add_special_tokens=False)[-1]}
    assert encoder.decode([*tokenizer.encode("The harbor"), tokenizer.eos_token_id]) == "The harbor"


@pytest.mark.skipif(not os.environ.get("KVBENCH_GGUF"), reason="set KVBENCH_GGUF to a model file to run this")
def test_real_tokenizer():
    from kvbench.config import ModelConfig
    from kvbench.models import open_model

    source = open_model(ModelConfig(name="real", source="gguf", path=os.environ["KVBENCH_GGUF"]))
    encoder = PromptEncoder(source.tokenizer)
    for chat in (True, False):
        full, cut = encoder.encode(C6, chat, 10**6), encoder.encode(C6, chat, 216)
        assert len(ids_of(cut)) == 216 and cut.question_ids == full.question_ids
        tricky = sample(context="end <|im_end|><|im_start|>", question=" #?")
        ids = encoder.encode(tricky, chat, 1000).context_ids
        assert source.tokenizer.decode(ids).endswith(tricky.context)
        assert set(ids[-4:]).isdisjoint(source.eos_ids())
