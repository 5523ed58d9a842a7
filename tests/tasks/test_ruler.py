"""RULER's inputs fall into instruction, context, question and answer prefix without losing a character."""

from __future__ import annotations

import json

import pytest

from kvbench.errors import InputError
from kvbench.tasks import ruler
from kvbench.tasks.scoring import score
from tests.tasks.helpers import folder_from, write_lines

NIAH_HEAD = "A special magic number is hidden within the following text. Make sure to memorize it. "
NIAH_HEAD += "I will quiz you about the number afterwards.\n"
QA = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
# subset -> instruction, context, question, answer prefix; each context holds what could be taken for the question
MADE_UP = {
    "niah_single_1": (
        NIAH_HEAD,
        "Grass.\nWhat is the special magic number for it mentioned in the provided text? No. One of the special "
        "magic numbers for a-b is: 1234567.",
        "\nWhat is the special magic number for a-b mentioned in the provided text?",
        " The special magic number for a-b mentioned in the provided text is",
    ),
    "niah_multiquery": (
        NIAH_HEAD.replace("A special magic number is", "Some special magic numbers are"),
        "Text.",
        "\nWhat are all the special magic numbers for a, b, and c mentioned in the provided text?",
        " The special magic numbers for a, b, and c mentioned in the provided text are",
    ),
    "vt": (
        " Memorize and track the chain(s) of variable assignment hidden in the following text. ",
        "VAR A = 1\n Question: Find all variables that are assigned the value 1 in the text Answer: According to the "
        "chain(s) of variable assignment in the text above, 1 variables are assgined the value 1, they are:  A\n\n\n"
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\nVAR B = 2\n",
        "\nQuestion: Find all variables that are assigned the value 2 in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, 1 variables are assgined the "
        "value 2, they are: ",
    ),
    "cwe": (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
        "that appear most often.\n",
        "1. a 2. b\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that "
        "appear most often in the list are:1. a\n1. c 2. d",
        "\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
    ),
    "fwe": (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. ",
        "... abc ... ",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
        "frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
    ),
    "qa_1": (
        QA + "\n\nThe following are given documents.\n\n",
        "Document 1:\nQuestion: Who? Answer: me",
        "\n\n" + QA + "\n\nQuestion: What Answer: is it?",
        " Answer:",
    ),
}


@pytest.mark.parametrize("subset", MADE_UP)
def test_inputs_are_split_at_the_last_question(subset):
    parts = MADE_UP[subset]
    assert ruler.split_input(ruler.family(subset), "".join(parts)) == parts


def test_real_files_join_again():
    """KVBENCH_RULER names a folder with <length>/<subset>.jsonl."""
    folder = folder_from("KVBENCH_RULER")
    if folder is None:
        pytest.skip("KVBENCH_RULER is not set")
    for file in sorted(folder.glob("*/*.jsonl")):
        task = ruler.build(name=f"ruler/{file.stem}", subset=file.stem, path=str(file))
        for line, sample in zip(file.read_text().splitlines(), task.samples, strict=True):
            parts = (sample.instruction, sample.context, sample.question, sample.answer_prefix)
            assert all(parts) and sample.error is None
            assert "".join(parts) == json.loads(line)["input"]


def test_tasks_carry_the_official_limits_and_metrics():
    limits = {"niah_single_1": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa_2": 32}
    assert {subset: ruler.family(subset).max_new_tokens for subset in limits} == limits
    assert {s for s in ruler.SUBSETS if ruler.family(s).metric == "string_match_part"} == {"qa_1", "qa_2"}
    assert {s for s in ruler.SUBSETS if not ruler.family(s).has_question} == {"cwe", "fwe"}  # one fixed question


def test_a_file_is_read_with_its_bad_lines_and_scored_by_the_share_found(tmp_path):
    text = "".join(MADE_UP["niah_single_1"])
    file = write_lines(
        tmp_path / "niah_multikey_1" / "validation.jsonl",
        [
            {"index": 0, "input": text, "outputs": ["12", "34"], "length": 99},
            b"{",
            {"index": 2, "input": "of another task", "outputs": ["1"]},
            {"index": 3, "input": text},
            {"index": 4, "input": "".join(MADE_UP["niah_single_1"][:3]), "outputs": ["1"], "answer_prefix": " It is"},
        ],
    )
    task = ruler.build(name="ruler/niah_multikey_1", subset="niah_multikey_1", path=str(tmp_path))
    assert task == ruler.build(name="ruler/niah_multikey_1", subset="niah_multikey_1", path=str(file))
    assert [sample.id for sample in task.samples if sample.error] == ["line-2", "line-3", "line-4"]
    assert task.samples[4].answer_prefix == " It is"  # newer releases keep it beside the input
    assert score(task, task.samples[0], "It is 12.") == 50.0


def test_missing_files_and_unknown_names_say_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"validation\.jsonl"):
        ruler.build(name="ruler/vt", subset="vt", path=str(tmp_path))
    with pytest.raises(InputError, match=r"vt\.jsonl"):
        ruler.build(name="ruler/vt", subset="vt")
    with pytest.raises(InputError, match="niah_single_1"):
        ruler.family("niah_singel_1")
