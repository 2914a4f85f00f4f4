"""LongBench's metrics, 0 to 1: the best over a row's references, on the part that counts.

They give the official numbers: ROUGE-L is that of the package `rouge` (union of the sentences'
longest common subsequences; `rouge-score` gives others), and the similarity of code is that of
fuzzywuzzy without its optional C extension, which is `difflib`'s ratio in whole percent
(rapidfuzz's ratio, an edit distance, differs by up to ten points).

Source: THUDM/LongBench, metrics.py and eval.py.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable

from rouge import Rouge

from kvjax.evaluation.rows import Row
from kvjax.evaluation.scoring import Metric

FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # datasets of which one line counts

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_ROUGE = Rouge(metrics=["rouge-l"], stats=["f"])
_COMMENTS = ("`", "#", "//")


def qa_f1(prediction: str, reference: str, classes: tuple[str, ...] = ()) -> float:
    """F1 of the words in common, without case, punctuation and articles."""
    said, wanted = _words(prediction), _words(reference)
    common = sum((Counter(said) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, reference: str, classes: tuple[str, ...] = ()) -> float:
    """F of ROUGE-L; 0 where either text holds no sentence."""
    try:
        return float(_ROUGE.get_scores(prediction, reference)[0]["rouge-l"]["f"])
    except (ValueError, AssertionError):  # what the package raises for empty texts
        return 0.0


def classification(prediction: str, reference: str, classes: tuple[str, ...] = ()) -> float:
    """1 over the number of classes named in the prediction, if the right one is among them.

    A class whose name is a part of the right one's does not count as named.

    Args:
        prediction: the answer.
        reference: name of the right class.
        classes: names of all classes.
    """
    named = [name for name in classes if name in prediction]
    named = [name for name in named if name == reference or name not in reference]
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, classes: tuple[str, ...] = ()) -> float:
    """Share of the numbers in the prediction that are the one in "Paragraph n".

    Raises:
        ValueError: for a reference without it.
    """
    found = re.search(r"Paragraph (\d+)", reference)
    if not found:
        raise ValueError(f"the reference {reference!r} must read like 'Paragraph 3'.")
    return _share(prediction, found[1])


def count(prediction: str, reference: str, classes: tuple[str, ...] = ()) -> float:
    """Share of the numbers in the prediction that are the reference."""
    return _share(prediction, str(reference))


def code_sim(prediction: str, reference: str, classes: tuple[str, ...] = ()) -> float:
    """Likeness, in whole percent over 100, of the first line that is neither comment nor fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in _COMMENTS)), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def _words(text: str) -> list[str]:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", text).split()


def _share(prediction: str, wanted: str) -> float:
    numbers = _NUMBER.findall(prediction)
    return sum(number == wanted for number in numbers) / len(numbers) if numbers else 0.0


def _over_references(metric: Callable[[str, str, tuple[str, ...]], float]) -> Metric:
    """The metric of a row: its best over the references, on the first line where only that counts.

    The row's `extra` holds `dataset` and, for classes, `all_classes`.
    """

    def score(prediction: str, row: Row) -> float:
        if row.extra.get("dataset") in FIRST_LINE:
            prediction = prediction.lstrip("\n").split("\n")[0]
        classes = tuple(row.extra.get("all_classes") or ())
        return max(metric(prediction, reference, classes) for reference in row.answer)

    return score


METRICS: dict[str, Metric] = {
    metric.__name__: _over_references(metric)
    for metric in (qa_f1, rouge_l, classification, retrieval, count, code_sim)
}
