"""LongBench's English datasets: metric, limit of new tokens, and a prompt in our own wording.

The official wording is in the benchmark's repository (dataset2prompt.json); scores under another
wording are not comparable with published ones. Limits and the choice of metric, of datasets
without a chat template and of those in LongBench-E are the official ones.

Source: THUDM/LongBench, config/dataset2maxlen.json, eval.py, pred.py.
"""

from typing import NamedTuple


class Dataset(NamedTuple):
    """How a dataset is asked and scored.

    Attributes:
        group: kind of task, as LongBench's paper groups them.
        metric: name in `longbench_metrics.METRICS`.
        max_new_tokens: limit of an answer, tokens.
        template: the prompt, with {context} once and {input} where the row has a question.
        answer_prefix: text that the answer follows.
        chat: whether the prompt is a turn of a chat.
        extended: whether LongBench-E has it too.
    """

    group: str
    metric: str
    max_new_tokens: int
    template: str
    answer_prefix: str = ""
    chat: bool = True
    extended: bool = False


_ONE_DOCUMENT, _DOCUMENTS = "single-document QA", "multi-document QA"
_SUMMARY, _FEW_SHOT, _SYNTHETIC, _CODE = "summarization", "few-shot", "synthetic", "code"

_PASSAGES = (
    "Several passages follow. Use them to answer the question at the end.\n\n{context}\n\n"
    "Reply with the answer alone, in as few words as possible.\n\nQuestion: {input}\n"
)
_CODE_LINE = "Here is part of a source file. Write the one line of code that comes next.\n"

DATASETS: dict[str, Dataset] = {
    "narrativeqa": Dataset(
        _ONE_DOCUMENT, "qa_f1", 128,
        "Below is a story, a novel or the script of a film. A question about it follows.\n\n"
        "{context}\n\nReply with a short phrase and nothing else.\n\nQuestion: {input}\n",
        "Answer:",
    ),
    "qasper": Dataset(
        _ONE_DOCUMENT, "qa_f1", 128,
        "Below is a scientific paper. A question about it follows.\n\n{context}\n\n"
        "Reply with a phrase or one sentence and nothing else. Say yes or no to a question that"
        " asks for it, and unanswerable where the paper does not tell.\n\nQuestion: {input}\n",
        "Answer:", extended=True,
    ),
    "multifieldqa_en": Dataset(
        _ONE_DOCUMENT, "qa_f1", 64,
        "Below is a document. A question about it follows.\n\n{context}\n\n"
        "Reply with the answer alone.\n\nQuestion: {input}\n",
        "Answer:", extended=True,
    ),
    "hotpotqa": Dataset(_DOCUMENTS, "qa_f1", 32, _PASSAGES, "Answer:", extended=True),
    "2wikimqa": Dataset(_DOCUMENTS, "qa_f1", 32, _PASSAGES, "Answer:", extended=True),
    "musique": Dataset(_DOCUMENTS, "qa_f1", 32, _PASSAGES, "Answer:"),
    "gov_report": Dataset(
        _SUMMARY, "rouge_l", 512,
        "Below is a report of a public authority.\n\n{context}\n\n"
        "Summarize the report on about one page.\n",
        "Summary:", extended=True,
    ),
    "qmsum": Dataset(
        _SUMMARY, "rouge_l", 512,
        "Below is the transcript of a meeting. A question or task about it follows.\n\n{context}"
        "\n\nReply in one or a few sentences.\n\nTask: {input}\n",
        "Answer:",
    ),
    "multi_news": Dataset(
        _SUMMARY, "rouge_l", 512,
        "Below are news articles on one event.\n\n{context}\n\n"
        "Summarize all of them together on about one page.\n",
        "Summary:", extended=True,
    ),
    "trec": Dataset(
        _FEW_SHOT, "classification", 64,
        "Name the type of the last question; the others show how.\n\n{context}\n{input}",
        chat=False, extended=True,
    ),
    "triviaqa": Dataset(
        _FEW_SHOT, "qa_f1", 32,
        "Answer the last question from its passage, in as few words as possible; the others show"
        " how.\n\n{context}\n\n{input}",
        chat=False, extended=True,
    ),
    "samsum": Dataset(
        _FEW_SHOT, "rouge_l", 128,
        "Sum up the last dialogue in a few short sentences; the others show how.\n\n{context}\n\n"
        "{input}",
        chat=False, extended=True,
    ),
    "passage_count": Dataset(
        _SYNTHETIC, "count", 32,
        "Below are numbered paragraphs; some of them are there several times.\n\n{context}\n\n"
        "How many different paragraphs are there? Reply with the number alone.\n",
        "Number:", extended=True,
    ),
    "passage_retrieval_en": Dataset(
        _SYNTHETIC, "retrieval", 32,
        "Below are numbered paragraphs and, after them, a summary of one.\n\n{context}\n\n"
        "Summary: {input}\n\nWhich paragraph is it of? Reply like this: Paragraph 7\n",
        "Answer:", extended=True,
    ),
    "lcc": Dataset(
        _CODE, "code_sim", 64, _CODE_LINE + "{context}Next line:\n", chat=False, extended=True,
    ),
    "repobench-p": Dataset(
        _CODE, "code_sim", 64, _CODE_LINE + "{context}{input}Next line:\n",
        chat=False, extended=True,
    ),
}  # fmt: skip
