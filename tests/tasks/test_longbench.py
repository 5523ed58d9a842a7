"""LongBench: official prompts byte for byte, rules, and the places its data may lie."""

from __future__ import annotations

import hashlib
import json
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import InputError
from kvbench.tasks import longbench
from tests.tasks.helpers import GOLDEN, folder_from, joined, write_lines

EXTENDED = {
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum"),
    *("passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
}


def record(context="Some text.", question="Who?", identity="id-1", **changes):
    return {
        "input": question,
        "context": context,
        "answers": ["me"],
        "length": 3,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": identity,
    } | changes


def build(path, subset="qasper", **changes):
    return longbench.build(name=f"longbench/{subset}", subset=subset, path=str(path), **changes)


def test_the_tasks_and_their_rules_are_the_official_ones():
    tasks = longbench.tasks()
    assert len(tasks) == 21
    assert {name for name, task in tasks.items() if task.extended} == EXTENDED
    few_shot_and_code = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, task in tasks.items() if not task.chat} == few_shot_and_code
    assert {name for name, task in tasks.items() if task.stop_at_newline} == {"samsum"}
    no_question = {"gov_report", "multi_news", "passage_count", "lcc", "vcsum"}
    assert {name for name, task in tasks.items() if not task.has_question} == no_question
    assert {name for name, task in tasks.items() if "{input}" not in task.prompt} == no_question
    assert tasks["gov_report"].max_new_tokens == 512 and tasks["hotpotqa"].max_new_tokens == 32
    assert "asconcisely" in tasks["narrativeqa"].prompt  # the official misspelling is part of the prompt


@pytest.mark.parametrize("name", longbench.tasks())
@given(
    context=st.sampled_from(
        ["a {input} b {context} {0} {{}}", "ends in ###", "", " \n ", "{", "}", "\u2028x\x85", "文"]
    ),
    question=st.sampled_from(["{context}", "", "is {this} it?", "}{", "\n"]),
)
def test_segments_join_to_the_official_prompt_whatever_the_texts_contain(name, context, question):
    """The official prompt is str.format of the template, which inserts texts and never looks into them."""
    task = longbench.tasks()[name]
    head, document, tail = task.segments(context, question)
    assert head + document + tail == task.prompt.format(context=context, input=question)
    assert document == context


def test_prompts_of_made_up_records_have_committed_hashes(tmp_path):
    """Committed once the real records' hashes were equal; a change of one byte in a template shows here."""
    contexts = ["The harbour {was} closed.\n###", "港口于三月关闭。"]
    records = [record(text, "When {input}?", f"r{i}", all_classes=["a"]) for i, text in enumerate(contexts)]
    found = {}
    for subset in longbench.tasks():
        write_lines(tmp_path / f"{subset}.jsonl", records)
        text = "\0".join(joined(sample) for sample in build(tmp_path, subset).samples)
        found[subset] = hashlib.sha256(text.encode()).hexdigest()[:16]
    wanted = json.loads((GOLDEN / "longbench_prompt_sha256.json").read_text())
    assert found == wanted


def test_prompts_of_the_real_records_have_their_published_hashes():
    """KVBENCH_LONGBENCH names a folder with <task>.jsonl and prompt_sha256.json."""
    folder = folder_from("KVBENCH_LONGBENCH")
    if folder is None:
        pytest.skip("KVBENCH_LONGBENCH is not set")
    checked = 0
    for key, rows in json.loads((folder / "prompt_sha256.json").read_text()).items():
        family, stem = key.split("/")
        extended = family == "longbench_e"
        samples = build(folder.parent / family, stem.removesuffix("_e"), extended=extended).samples
        assert len(samples) == len(rows)
        for sample, (identity, characters, sha256) in zip(samples, rows, strict=True):
            assert (sample.id, len(joined(sample))) == (identity, characters)
            assert hashlib.sha256(joined(sample).encode()).hexdigest() == sha256
            checked += 1
    assert checked >= 200


def test_samples_carry_ids_groups_classes_and_info(tmp_path):
    """Missing and repeated ids get the line's number: two samples with one id would overwrite each other's record."""
    records = [
        record(identity=None),
        record(question="Where?"),
        record("Other text.", all_classes="['A', 'B']", answers="['x', 'y']"),
        record(answers="[1] is a reference"),
    ]
    first, second, third, fourth = build(write_lines(tmp_path / "qasper.jsonl", records)).samples
    assert [s.id for s in (first, second, third, fourth)] == ["qasper-1", "id-1", "id-1-3", "id-1-4"]
    assert first.group == second.group == fourth.group != third.group
    assert third.classes == ("A", "B") and third.info["classes"] == ["A", "B"] and third.answers == ("x", "y")
    assert first.classes == () and "classes" not in first.info
    assert fourth.answers == ("[1] is a reference",)  # no list in spite of its bracket
    assert first.info["length"] == 3 and first.info["language"] == "en" and first.info["dataset"] == "qasper"


def test_folder_zip_and_parquet_give_the_same_task(tmp_path):
    from datasets import Dataset

    records = [record(), record("Ends in {", "", "id-2", length=None)]
    lines = write_lines(tmp_path / "lines" / "qasper.jsonl", records)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(lines, "data/qasper.jsonl")
    (tmp_path / "parquet" / "qasper").mkdir(parents=True)
    Dataset.from_list(records).to_parquet(tmp_path / "parquet" / "qasper" / "test-00000-of-00001.parquet")
    wanted = build(lines.parent)
    for path in (
        lines,
        tmp_path / "data.zip",
        tmp_path / "parquet",
        tmp_path / "parquet/qasper/test-00000-of-00001.parquet",
    ):
        assert build(path) == wanted
    changed = write_lines(
        tmp_path / "changed" / "qasper.jsonl", [record(), record("Ends in }", "", "id-2", length=None)]
    )
    assert build(changed).data_sha256 != wanted.data_sha256  # same name, other content: another cell (C14)


def test_extended_tasks_read_their_own_files(tmp_path):
    write_lines(tmp_path / "qasper.jsonl", [record()])
    write_lines(tmp_path / "qasper_e.jsonl", [record("Other.")])
    assert build(tmp_path, extended=True).samples[0].context == "Other."
    assert [longbench.bucket(n) for n in (3999, 4000, 7999, 8000)] == ["0-4k", "4-8k", "4-8k", "8k+"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([b"{"], "line 1"),
        ([record(), b"[1]"], "line 2"),
        ([record(context=None)], "record 1"),
        ([record(answers=[])], "record 1"),
        ([], "not one record"),
    ],
)
def test_a_file_that_is_not_longbench_is_refused(tmp_path, content, says):
    with pytest.raises(InputError, match=says) as caught:
        build(write_lines(tmp_path / "qasper.jsonl", content))
    assert caught.value.key == "task.path"


def test_missing_data_and_unknown_tasks_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no such file"):
        build(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"qasper\.jsonl"):
        build(tmp_path)
    with pytest.raises(InputError, match="longbench/qasper"):
        longbench.rules("qaspr")
    with pytest.raises(InputError, match="longbench_e"):
        longbench.rules("narrativeqa", extended=True)  # not one of the 13
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE") as caught:
        longbench.build(name="longbench/qasper", subset="qasper")
    assert caught.value.key == "task.path"


def offline(*args, **kwargs):
    raise OSError("the network is unreachable")
