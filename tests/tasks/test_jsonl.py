"""The user's own lines: good ones keep every character, bad ones cost one sample each."""

from __future__ import annotations

import json

import pytest

from kvbench.errors import InputError
from kvbench.tasks import jsonl
from tests.tasks.helpers import write_lines

GOOD = {"id": "a", "context": "Text.", "question": "Who?", "answers": ["me"]}


def build(tmp_path, *records, **changes):
    return jsonl.build(path=str(write_lines(tmp_path / "data.jsonl", records)), **changes)


BAD = {
    "no JSON": b'{"id": "a", ',
    "no object": b"[1, 2]",
    "no id": {k: v for k, v in GOOD.items() if k != "id"},
    "no context": {k: v for k, v in GOOD.items() if k != "context"},
    "no question": {k: v for k, v in GOOD.items() if k != "question"},
    "no answers": {k: v for k, v in GOOD.items() if k != "answers"},
    "context is a number": GOOD | {"context": 3},
    "question is null": GOOD | {"question": None},
    "answers is a text": GOOD | {"answers": "me"},
    "answers is empty": GOOD | {"answers": []},
    "answer is blank": GOOD | {"answers": ["me", " "]},
    "id is a list": GOOD | {"id": ["a"]},
    "no UTF-8": b'{"id": "a", "context": "\xff", "question": "?", "answers": ["me"]}',
    "NaN": b'{"id": "a", "context": "", "question": "?", "answers": ["me"], "weight": NaN}',
    "unknown metric": GOOD | {"metric": "qa_f1"},
    "limit is 0": GOOD | {"max_new_tokens": 0},
    "limit is a text": GOOD | {"max_new_tokens": "9"},
    "classes is a text": GOOD | {"classes": "abc"},
    "deeply nested": b"[" * 100_000,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_line_is_a_sample_with_an_error_named_after_its_line(tmp_path, bad):
    """Not the end of the run, and not a line that is silently left out."""
    samples = build(tmp_path, GOOD | {"id": "first"}, bad, GOOD | {"id": "last"}).samples
    assert [sample.id for sample in samples] == ["first", "line-2", "last"]
    assert samples[1].error and samples[1].error.startswith("line 2: ")
    assert samples[0].error is None and samples[2].error is None


def test_the_second_of_two_equal_ids_is_an_error(tmp_path):
    """Equal ids would share one record; 7 and "7" are written the same way."""
    samples = build(tmp_path, GOOD | {"id": 7}, GOOD | {"id": "7"}, GOOD | {"id": "line-4"}, b"{").samples
    assert [sample.id for sample in samples] == ["7", "line-2", "line-4", "line-4-bad"]
    assert [sample.error is None for sample in samples] == [True, False, True, False]


@pytest.mark.parametrize(
    "context", ["ends in ###", " [/INST]</s>", "ends in blanks \n ", "\u2028\x85", "{context}", "", "\ud83d"]
)
def test_context_and_question_keep_every_character(tmp_path, context):
    """Case C13: nothing in a text is taken for a separator. Half a character (\\ud83d) is the encoder's to mend."""
    record = json.dumps({"id": "a", "context": context, "question": "{0}#", "answers": ["me"]}).encode()
    (sample,) = build(tmp_path, record).samples
    assert sample.error is None and sample.context == context and sample.question == "\n\n{0}#"


def test_the_separator_goes_before_questions_that_are_not_empty(tmp_path):
    records = [GOOD, GOOD | {"id": "b", "question": "", "other_question": "Where?"}]
    first, second = build(tmp_path, *records, separator=" | ").samples
    assert first.question == " | Who?" and second.question == "" and second.other_question == " | Where?"
    assert build(tmp_path, GOOD, separator="").samples[0].question == "Who?"


def test_optional_keys_reach_the_sample(tmp_path):
    extra = {"metric": "classification_score", "max_new_tokens": 5, "classes": ["x", "y"], "instruction": "Read: "}
    extra |= {"answer_prefix": " It is", "other_question": "Where?", "other_answer_prefix": " In", "group": "g"}
    (sample,) = build(tmp_path, GOOD | extra).samples
    assert (sample.metric, sample.max_new_tokens, sample.classes) == ("classification_score", 5, ("x", "y"))
    assert (sample.instruction, sample.answer_prefix, sample.group) == ("Read: ", " It is", "g")
    assert (sample.other_question, sample.other_answer_prefix) == ("\n\nWhere?", " In")
    assert sample.info == {"metric": "classification_score", "classes": ["x", "y"]}  # re-scoring records needs them


def test_one_answer_may_be_a_text_of_its_own(tmp_path):
    record = {k: v for k, v in GOOD.items() if k != "answers"} | {"answer": "me"}
    assert build(tmp_path, record).samples[0].answers == ("me",)


def test_samples_with_the_same_context_share_a_group(tmp_path):
    """The rule that one blind cache serves all questions about a context rests on it."""
    same, other, named, clash = (
        GOOD | {"id": "b", "question": "Where?"},
        GOOD | {"id": "c", "context": "Other."},
        GOOD | {"id": "d", "group": "g"},
        GOOD | {"id": "e", "group": "g", "context": "Other."},
    )
    samples = build(tmp_path, GOOD, same, other, named, clash).samples
    assert samples[0].group == samples[1].group != samples[2].group
    assert samples[4].error and "group" in samples[4].error


def test_files_with_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    file = tmp_path / "windows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"id": 1, "context": "c", "question": "q", "answers": ["a"]}\r\n\r\n')
    (sample,) = jsonl.build(path=str(file)).samples
    assert sample.id == "1" and sample.error is None


def test_the_content_hash_follows_the_bytes(tmp_path):
    """Case C14: two files with one name and other content are two cells."""
    first = build(tmp_path, GOOD).data_sha256
    assert build(tmp_path, GOOD).data_sha256 == first
    assert build(tmp_path, GOOD | {"answers": ["you"]}).data_sha256 != first


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"path": None}, "task.path", "FILE.jsonl"),
        ({"path": "/nowhere/x.jsonl"}, "task.path", "cannot be read"),
        ({"path": "/"}, "task.path", "cannot be read"),
        ({"path": "/x", "metric": "qa_f1"}, "task.metric", "qa_f1_score"),  # the nearest name
        ({"path": "/x", "max_new_tokens": 0}, "task.max_new_tokens", "1 or more"),
    ],
)
def test_wrong_settings_are_found_at_once(changes, key, says):
    with pytest.raises(InputError, match=says) as caught:
        jsonl.build(**changes)
    assert caught.value.key == key


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="no lines"):
        build(tmp_path, b"", b"  ")
