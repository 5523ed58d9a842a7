"""The metrics against hand-made values (case C7), values of the official functions, and the original packages."""

from __future__ import annotations

import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.tasks import metrics
from kvbench.tasks.lcs import lcs_length, lcs_words
from kvbench.tasks.metrics import METRICS
from kvbench.tasks.rules import scoring_rules
from kvbench.tasks.scoring import score_answers
from tests.tasks.helpers import GOLDEN, lines

CLASSES = ("Plant", "Animal", "Food")
ZH = "今天的会议讨论了明年的预算安排"

# task, prediction, answers, score 0..100 under the task's own rules, and why it is that
C7 = [
    ("qasper", "The harbor was closed in March 1911.", ["unknown", "March 1911"], 50.0),  # 2 of 6 and 2 of 2 words
    ("trec", "\nPlant\nQuestion: What is a fern?\nType: Animal", ["Plant"], 100.0),  # the first line that is not empty
    ("gov_report", "red cats rest on warm stones", ["red cats sleep on warm stones"], 83.33),  # 5 of 6 words
    ("vcsum", ZH, [ZH], 100.0),
    ("vcsum", ZH, ["苹果香蕉"], 0.0),  # no character in common
    ("passage_count", "There are 7 unique paragraphs out of 12", ["7"], 50.0),  # one of two numbers
    ("passage_retrieval_en", "Paragraph 3 or Paragraph 13", ["Paragraph 3"], 50.0),
    ("lcc", "# a comment\nreturn x + 1", ["return x + 1"], 100.0),  # comment lines are passed over
    ("repobench-p", "// a comment\nreturn x;", ["return x;"], 100.0),
]


@pytest.mark.parametrize(("task", "prediction", "answers", "wanted"), C7)
def test_golden_values_of_case_c7(task, prediction, answers, wanted):
    rules = scoring_rules(f"longbench/{task}")
    found = score_answers(rules.metric, prediction, answers, CLASSES, rules.first_line)
    assert round(100 * found, 2) == wanted


@pytest.mark.parametrize("name", METRICS)
def test_an_empty_prediction_scores_zero(name):
    """It is a wrong answer, not an error, whatever the metric."""
    answer = {"retrieval_score": "Paragraph 3", "retrieval_zh_score": "段落3"}.get(name, "Plant")
    assert METRICS[name]("", answer, CLASSES) == 0.0


def test_rouge_of_two_texts_of_5000_words_finishes():
    """The original needs gigabytes and a recursion 10,000 deep; shared words are every second one, F is 1/2."""
    first = " ".join(f"w{i}" if i % 2 else f"a{i}" for i in range(5000))
    second = " ".join(f"w{i}" if i % 2 else f"b{i}" for i in range(5000))
    start = time.perf_counter()
    assert metrics.rouge_score(first, second) == pytest.approx(0.5, abs=1e-6)
    assert metrics.rouge_score_rougeL(first, second) == pytest.approx(0.5, abs=1e-12)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    "case", lines(GOLDEN / "edge_cases.jsonl"), ids=lambda c: f"{c['metric']}-{c['prediction']:.12}"
)
def test_made_up_pairs_score_as_the_official_functions_scored_them(case):
    found = METRICS[case["metric"]](case["prediction"], case["ground_truth"], case["all_classes"] or ())
    assert found == case["score"]


def test_published_predictions_score_as_the_official_functions_scored_them():
    """Real predictions of all 21 tasks: per-record scores, equal in every bit."""
    records = lines(GOLDEN / "longbench_records.jsonl")
    assert len({record["task"] for record in records}) == 21
    for record in records:
        rules = scoring_rules(f"longbench/{record['task']}")
        assert rules.metric == record["metric"]
        found = score_answers(
            rules.metric, record["pred"], record["answers"], record["all_classes"] or (), rules.first_line
        )
        assert found == record["score"], record


words = st.lists(st.sampled_from(["a", "b", "c", "d", "e", ".", "cat,", "The"]), max_size=24).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(words, words)
def test_rouge_equals_the_package_bit_for_bit(prediction, answer):
    """``rouge`` 1.0.1 is the reference; it raises for texts without a word, which the official code counts as 0."""
    reference = pytest.importorskip("rouge").Rouge()
    try:
        wanted = reference.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except ValueError:
        wanted = 0.0
    with_twin_too(lambda: metrics.rouge_score(prediction, answer), lambda score: score == wanted)


@settings(max_examples=200, deadline=None)
@given(words, words)
def test_rougel_equals_the_package_rouge_score(prediction, answer):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    wanted = scorer.score(answer, prediction)["rougeL"].fmeasure
    with_twin_too(
        lambda: metrics.rouge_score_rougeL(prediction, answer), lambda score: score == pytest.approx(wanted, abs=1e-12)
    )


def with_twin_too(score, right):
    """Both ways of computing a score, through the package and, as for long texts, without it."""
    assert right(score())
    with mock.patch.object(metrics, "LONGEST_FOR_PACKAGES", 0):
        assert right(score())


def plain_lcs(first, second):
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=30), st.lists(st.sampled_from("abcd"), max_size=30))
def test_bit_parallel_lcs_equals_the_plain_table(first, second):
    wanted = plain_lcs(first, second)
    assert lcs_length(first, second) == wanted
    found = lcs_words(first, second)
    assert len(found) == wanted
    for text in (first, second):  # a subsequence of both
        rest = iter(text)
        assert all(word in rest for word in found)


@pytest.mark.parametrize(
    ("prediction", "answer", "wanted"),
    [
        ("The pass key is 12345.", "12345", 1.0),
        ("12345", "12345", 1.0),
        ("123456", "12345", 0.0),  # another number
        ("912345 and x12345", "12345", 0.0),  # parts of words
        ("912345, no: 12345", "12345", 1.0),  # a later place counts
        ("Sit in DOLORES  park!", "Dolores Park", 1.0),  # case, spacing and punctuation do not count
        ("at a quarter-past four", "a quarter past four", 1.0),
        ("parking", "park", 0.0),
        ("答案是四点半。", "四点半", 1.0),  # Chinese has no spaces between words
        ("ｄｏｌｏｒｅｓ", "dolores", 1.0),  # full width
    ],
)
def test_a_fact_must_stand_as_whole_words(prediction, answer, wanted):
    assert metrics.contains(prediction, answer) == wanted


def test_ruler_matches_substrings_and_takes_the_share_or_the_best():
    found = "the numbers are 12 and 345"
    assert score_answers("string_match_all", found, ["12", "345", "6"]) == pytest.approx(2 / 3)
    assert score_answers("string_match_part", found, ["6", "345"]) == 1.0
    assert score_answers("string_match_part", "PARIS it is", ["Paris"]) == 1.0  # lower-cased both


@pytest.mark.parametrize(
    ("name", "answer", "classes"),
    [
        ("classification_score", "Plant", ()),  # no label set
        ("retrieval_score", "3", ()),  # names no paragraph
        ("retrieval_zh_score", "3", ()),
        ("contains", "?!", ()),  # nothing left of the answer, which everything would contain
        ("string_match_all", "", ()),
    ],
)
def test_what_cannot_be_computed_raises_and_is_no_zero(name, answer, classes):
    with pytest.raises(ValueError):
        METRICS[name]("Plant 3", answer, classes)
