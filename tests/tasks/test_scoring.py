"""A task's scoring rules: which answers, which line, which further metrics."""

from __future__ import annotations

import pytest

from kvbench.tasks import longbench
from kvbench.tasks.sample import Sample, Task
from kvbench.tasks.scoring import extra_scores, score


def task(metric: str, **changes) -> Task:
    return Task("t", metric, 8, (), "", **changes)


def sample(*answers: str, **changes) -> Sample:
    return Sample("s", "context", "question", answers, **changes)


def test_the_first_line_rule_holds_for_exactly_four_tasks():
    assert {n for n, t in longbench.tasks().items() if t.first_line} == {"trec", "triviaqa", "samsum", "lsht"}


@pytest.mark.parametrize(("first_line", "wanted"), [(True, 100.0), (False, 50.0)])
def test_first_line_drops_what_follows_and_leading_newlines(first_line, wanted):
    """ "\\n7\\n12": one number of one with the rule, one of two without."""
    assert score(task("count_score", first_line=first_line), sample("7"), "\n7\n12") == wanted


def test_the_best_answer_counts_and_a_sample_may_name_its_metric():
    assert score(task("qa_f1_score"), sample("no", "yes"), "yes") == 100.0
    assert score(task("qa_f1_score"), sample("12345", metric="passkey"), "is 12345") == 100.0


def test_rouge_tasks_report_rouge_score_beside_the_official_one():
    """ "The" against "the": the official ROUGE minds the case, rouge-score does not."""
    extra = extra_scores(task("rouge_score"), sample("the cat"), "The cat")
    assert extra == {"rouge_score_rougeL": 100.0}
    assert score(task("rouge_score"), sample("the cat"), "The cat") == pytest.approx(50.0, abs=1e-5)
    assert extra_scores(task("rouge_zh_score"), sample("明年的预算"), "明年的预算") == {"rouge_score_rougeL": 100.0}
    assert extra_scores(task("qa_f1_score"), sample("x"), "x") == {}


@pytest.mark.parametrize("bad", [sample(), sample("a", metric="nosuch")])
def test_no_answer_and_no_metric_are_errors_and_not_zeros(bad):
    with pytest.raises(ValueError):
        score(task("qa_f1_score"), bad, "a")
