"""The metrics: ``fn(prediction, answer, classes) -> 0..1`` for one gold answer, by name in METRICS.

The LongBench ones follow the official definitions to the last digit, quirks included, so that scores can be compared
with published ones. A metric that cannot be computed raises ValueError; it never returns a number instead.
"""

from __future__ import annotations

import re
import string
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from kvbench.tasks.lcs import lcs_length, lcs_words

Metric = Callable[[str, str, Sequence[str]], float]

# The punctuation that LongBench's Chinese F1 ignores, beside the ASCII one.
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､"
    "、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_DROP_ASCII = str.maketrans("", "", string.punctuation)
_DROP_CHINESE = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


# --- LongBench: overlap of words ---------------------------------------------------------------------------------


def _f1(predicted: list[str], gold: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(gold)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _english_words(text: str) -> list[str]:
    """Lower-cased words without ASCII punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_DROP_ASCII)).split()


def qa_f1_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of the bags of normalised words."""
    return _f1(_english_words(prediction), _english_words(answer))


def _jieba_cut(text: str) -> list[str]:
    """Chinese word segmentation; the dictionary loads at the first call (about a second)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jieba 0.42.1 has invalid escapes in its sources, and imports pkg_resources
        import jieba
    jieba.setLogLevel(60)  # its progress lines would land among ours
    return list(jieba.cut(text, cut_all=False))


def _chinese_words(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_DROP_CHINESE).split()) for word in _jieba_cut(text))
    return [word for word in words if word]


def qa_f1_zh_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of the bags of jieba's words, without punctuation."""
    return _f1(_chinese_words(prediction), _chinese_words(answer))


# --- ROUGE -------------------------------------------------------------------------------------------------------


# The packages build a table of all word pairs and walk it recursively: texts of thousands of words without a '.' cost
# them gigabytes and Python's recursion limit (the official code turns that failure into a score of 0). Such texts go
# through kvbench.tasks.lcs, which computes the same numbers; tests hold the two together.
LONGEST_FOR_PACKAGES = 400  # words of a sentence


def _rouge_sentences(text: str) -> list[list[str]]:
    """Sentences as ``rouge`` 1.0.1 sees them: split at every '.', a blank one is one empty word."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def rouge_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Official ROUGE-L: the summary-level F of the package ``rouge`` (case and punctuation count, no stemming).

    A text of nothing but dots (or nothing at all), for which the package raises, is 0, as in the official code.
    """
    evaluated, reference = _rouge_sentences(prediction), _rouge_sentences(answer)
    if not evaluated or not reference:
        return 0.0
    if max(map(len, (*evaluated, *reference))) > LONGEST_FOR_PACKAGES:
        return _long_rouge(evaluated, reference)
    from rouge import Rouge

    scores: Any = Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)
    return scores["rouge-l"]["f"]


def _long_rouge(evaluated: list[list[str]], reference: list[list[str]]) -> float:
    union: set[str] = set()
    for gold_sentence in reference:
        for sentence in evaluated:
            union.update(lcs_words(gold_sentence, sentence))
    precision = len(union) / len({word for sentence in evaluated for word in sentence})
    recall = len(union) / len({word for sentence in reference for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge_zh_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L over jieba's words; the Chinese full stop does not end a sentence."""
    return rouge_score(" ".join(_jieba_cut(prediction)), " ".join(_jieba_cut(answer)))


class _Words:
    """A tokenizer for ``rouge-score``, whose own drops all Chinese."""

    def __init__(self, words: Callable[[str], list[str]]) -> None:
        self.tokenize = words


def _rouge_l(prediction: str, answer: str, words: Callable[[str], list[str]]) -> float:
    predicted, gold = words(prediction), words(answer)
    if max(len(predicted), len(gold)) <= LONGEST_FOR_PACKAGES:
        from rouge_score.rouge_scorer import RougeScorer

        return RougeScorer(["rougeL"], tokenizer=_Words(words)).score(answer, prediction)["rougeL"].fmeasure
    common = lcs_length(gold, predicted)
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def rouge_score_rougeL(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L as the package ``rouge-score`` defines it: one LCS over lower-cased ASCII words, no stemming."""
    return _rouge_l(prediction, answer, lambda text: re.findall("[a-z0-9]+", text.lower()))


def rouge_score_rougeL_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The same over jieba's words without punctuation."""
    return _rouge_l(prediction, answer, _chinese_words)


# --- LongBench: classes, numbers, code ---------------------------------------------------------------------------


def classification_score(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the prediction) if the gold one is among them.

    The official code removes classes that are part of the gold one *while iterating*, so the class after a removed
    one is never looked at; "abc" with the classes a, b, ab, abc scores 1/2 and not 1. Kept, for published scores.
    """
    if not classes:
        raise ValueError("classification_score needs the list of classes (all_classes)")
    named = [name for name in classes if name in prediction]
    index = 0
    while index < len(named):
        if named[index] in answer and named[index] != answer:
            named.remove(named[index])  # the next one moves to this index and is skipped
        index += 1
    return 1.0 / len(named) if answer in named else 0.0


def _share_of_numbers(prediction: str, number: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def count_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the gold one."""
    return _share_of_numbers(prediction, answer)


def _paragraph_number(pattern: str, answer: str) -> str:
    found = re.search(pattern, answer)
    if found is None:
        raise ValueError(f"the answer {answer!r} names no paragraph ({pattern})")
    return found.group(1)


def retrieval_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the gold "Paragraph N"."""
    return _share_of_numbers(prediction, _paragraph_number(r"Paragraph (\d+)", answer))


def retrieval_zh_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the gold "段落N"."""
    return _share_of_numbers(prediction, _paragraph_number(r"段落(\d+)", answer))


def code_sim_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line that is neither comment nor fence, in whole percent, by difflib's ratio.

    A Levenshtein ratio comes out 1.4 to 3.2 points higher on average, so the two must not be mixed.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


# --- facts and keys ----------------------------------------------------------------------------------------------


def string_match(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """RULER: 1 if the lower-cased answer is a substring of the lower-cased prediction."""
    if not answer:
        raise ValueError("an empty answer is part of every prediction")
    return float(answer.lower() in prediction.lower())


def _plain(text: str) -> str:
    """Compatibility-composed and case-folded; whatever is no letter, mark or digit becomes one space."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in text).split())


def _in_word(character: str) -> bool:
    """Digits and letters with case build words that a match must not split; Chinese is written without spaces."""
    return character.isdecimal() or character.upper() != character


def contains(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """1 if the normalised answer stands in the normalised prediction as whole words: "5" is not in "15"."""
    text, fact = _plain(prediction), _plain(answer)
    if not fact:
        raise ValueError(f"the answer {answer!r} has neither letters nor digits")
    start = text.find(fact)
    while start >= 0:
        end = start + len(fact)
        cut_before = start > 0 and _in_word(text[start - 1]) and _in_word(fact[0])
        cut_after = end < len(text) and _in_word(text[end]) and _in_word(fact[-1])
        if not cut_before and not cut_after:
            return 1.0
        start = text.find(fact, start + 1)
    return 0.0


METRICS: dict[str, Metric] = {
    "qa_f1_score": qa_f1_score,
    "qa_f1_zh_score": qa_f1_zh_score,
    "rouge_score": rouge_score,
    "rouge_zh_score": rouge_zh_score,
    "rouge_score_rougeL": rouge_score_rougeL,
    "rouge_score_rougeL_zh": rouge_score_rougeL_zh,
    "classification_score": classification_score,
    "count_score": count_score,
    "retrieval_score": retrieval_score,
    "retrieval_zh_score": retrieval_zh_score,
    "code_sim_score": code_sim_score,
    "string_match_all": string_match,
    "string_match_part": string_match,
    "contains": contains,
    "passkey": contains,  # the key's digits, as a whole number, anywhere in the prediction
}
# Every metric takes the best gold answer; these take the share of gold answers found.
MEAN_OVER_ANSWERS = frozenset({"string_match_all"})
# Named metrics reported beside a task's own.
EXTRA_METRICS: dict[str, dict[str, str]] = {
    "rouge_score": {"rouge_score_rougeL": "rouge_score_rougeL"},
    "rouge_zh_score": {"rouge_score_rougeL": "rouge_score_rougeL_zh"},
}


def unknown_metric(name: Any) -> str | None:
    """Why ``name`` is no metric, with the nearest one; None if it is."""
    if isinstance(name, str) and name in METRICS:
        return None
    near = get_close_matches(str(name), METRICS, n=1)
    hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(METRICS)
    return f"no metric is named {name!r}; {hint}"
