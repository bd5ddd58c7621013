"""Prepared data: what is written, stopped and killed and continued, damaged, mixed, and trained on."""

import contextlib
import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ROOT, environment, rows, run, settings, share_programs, snapshot, train
from test_sources import write_megatron

from train import corpus, data, loop, preparation, prepared
from train import tokenizer as tokenizer_lib
from train.errors import InputError, StorageError

DOCUMENTS = [f"document {i}: " + "word " * (i % 7) + "naïve." for i in range(60)]


def write_lines(path, documents):
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))


@pytest.fixture
def files(tmp_path):
    """Write 60 documents in six files; return the glob."""
    (tmp_path / "text").mkdir()
    for i in range(6):
        write_lines(tmp_path / "text" / f"{i}.jsonl", DOCUMENTS[i * 10 : i * 10 + 10])
    return f"{tmp_path}/text/*.jsonl"


def plan(files, **changes):
    chosen = {"val": "", "tokenizer": "bytes+eos", "marks": "eos", "text_key": "text", "val_fraction": 0.1, "unit_bytes": 1}
    return preparation.make_plan(train=files, **chosen | changes)


def prepare(tmp_path, files, name="out", *, workers=1, stop=lambda: False, **changes):
    """Prepare and return the mapped directory."""
    preparation.prepare(plan(files, **changes), tmp_path / name, workers=workers, stop=stop)
    return prepared.open_directory(tmp_path / name)


def documents_of(found, split):
    ids, ends = found.ids[split], found.ends[split]
    return [ids[a:b].tolist() for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def marked(text, tokenizer, marks):
    before, after = [tokenizer.bos_id] * ("bos" in marks), [tokenizer.eos_id] * ("eos" in marks)
    return [*before, *tokenizer.encode(text + corpus.SEPARATOR * (marks == "newlines")).tolist(), *after]


@pytest.mark.parametrize(
    ("spec", "marks"),
    [
        ("bytes+eos", "eos"),
        ("bytes", "newlines"),
        ("bytes", "none"),
        ("bpe:280+eos", "eos"),
        ("file", "bos+eos"),
        ("file", "bos"),
    ],
)
def test_every_document_is_there_once_with_its_marks(tmp_path, files, spec, marks):
    if spec == "file":
        made = tokenizer_lib.train_bpe(DOCUMENTS, "bpe:280+eos").to_json()
        spec = str(tmp_path / "tokenizer.json")
        (tmp_path / "tokenizer.json").write_text(made.replace("<|endoftext|>", "</s>"))
        config = {"bos_token": "a", "eos_token": "</s>"}  # a letter of the vocabulary may stand for BOS as well
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = prepare(tmp_path, files, tokenizer=spec, marks=marks)
    assert found.tokenizer().bos == (found.tokenizer().bos_id if "bos" in marks else None)
    held_out = [d for i, d in enumerate(DOCUMENTS) if preparation._is_held_out(i // 10, i % 10 + 1, 0.1)]
    assert [DOCUMENTS.index(d) // 10 for d in held_out] == list(range(6))  # of ten documents of each unit one
    kept = [d for d in DOCUMENTS if d not in held_out]
    for split, expected in (("train", kept), ("val", held_out)):
        assert documents_of(found, split) == [marked(text, found.tokenizer(), marks) for text in expected]
        of = found.manifest["splits"][split]
        assert (of["documents"], of["tokens"]) == (len(expected), len(found.ids[split]))
        assert of["text_bytes"] == sum(len(d.encode()) + 2 * (marks == "newlines") for d in expected)
        assert of["largest_id"] == found.ids[split].max()
    assert found.manifest["documents"] == marks


def test_files_for_validation_are_not_trained_on(tmp_path, files):
    write_lines(tmp_path / "v.jsonl", ["held", "out"])
    found = prepare(tmp_path, files, val=str(tmp_path / "v.jsonl"))
    assert [found.manifest["splits"][split]["documents"] for split in ("train", "val")] == [60, 2]
    with pytest.raises(InputError, match=r"5\.jsonl is both for training and for validation"):
        plan(files, val=f"{tmp_path}/text/../text/5.jsonl")


def test_the_result_does_not_depend_on_workers_or_units_or_stops(tmp_path, files):
    whole = prepare(tmp_path, files, "whole")
    many = prepare(tmp_path, files, "many", workers=3)
    assert snapshot(tmp_path / "many") == snapshot(tmp_path / "whole")
    for _ in range(6):
        left = iter([False] * 5)  # each time two units further
        with contextlib.suppress(preparation.Stopped):
            parts = prepare(tmp_path, files, "parts", stop=functools.partial(next, left, True))
            break
    assert snapshot(tmp_path / "parts") == snapshot(tmp_path / "whole")
    assert parts.manifest["digest"] == many.manifest["digest"] == whole.manifest["digest"]
    again = preparation.prepare(plan(files), tmp_path / "whole", workers=1)  # nothing is left to do
    assert again == whole.manifest


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_killed_at_any_time_the_same_command_ends_with_the_same_files(tmp_path, files, delay):
    whole = prepare(tmp_path, files, "whole")
    code = (
        "import pathlib, sys; sys.path.insert(0, 'tests'); import test_prepare\n"
        "if __name__ == '__main__':\n"
        f"    test_prepare.prepare(pathlib.Path({str(tmp_path)!r}), {files!r}, 'killed', workers=2)"
    )
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "progress.json").exists():
        time.sleep(0.01)
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    child.wait()
    prepare(tmp_path, files, "killed")
    assert snapshot(tmp_path / "killed") == snapshot(tmp_path / "whole")
    assert whole.manifest["splits"]["train"]["documents"] == 54


def test_a_fault_in_a_worker_process_is_one_line(tmp_path, files, monkeypatch):
    (tmp_path / "text" / "3.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"text/3\.jsonl:2: not UTF-8"):
        prepare(tmp_path, files, workers=2)
    assert not multiprocessing.active_children()
    monkeypatch.setattr(preparation, "_start_worker", _end)
    with pytest.raises(StorageError, match=r"out: a worker process was killed"):
        prepare(tmp_path, files, workers=2)


def _end(_):
    os._exit(1)


def test_token_files_are_taken_as_they_are(tmp_path):
    write_megatron(tmp_path / "m.idx", [[[1, 2, 3, 256]], [[4], [5, 6]], [[]]] * 2)
    found = prepare(tmp_path, str(tmp_path / "m.idx"), val_fraction=0.5)
    assert documents_of(found, "train") == [[1, 2, 3, 256]] * 2  # ended already
    assert documents_of(found, "val") == [[4, 5, 6, 256]] * 2
    write_megatron(tmp_path / "n.idx", [[[1, 2]], [[257]]])
    with pytest.raises(InputError, match=r"n\.idx, document 1: id 257 is not in \[0, 257\)"):
        prepare(tmp_path, str(tmp_path / "n.idx"), "other")


def test_what_does_not_go_together_is_refused(tmp_path, files):
    refused = {
        "no such token": {"marks": "bos"},
        r"tokenizer 'bytes' has no such token": {"tokenizer": "bytes"},
        "is not one of eos": {"marks": "both"},
        "val_fraction=0.0 is not between": {"val_fraction": 0.0},
        "neither bytes": {"tokenizer": "gpt2"},
    }
    for message, changes in refused.items():
        with pytest.raises(InputError, match=message):
            plan(files, **changes)
    with pytest.raises(InputError, match="no document is held out"):
        prepare(tmp_path, files, "empty", val_fraction=0.01)
    prepare(tmp_path, files)
    with pytest.raises(InputError, match="holds other data, prepared already"):
        prepare(tmp_path, files, marks="none")
    with pytest.raises(InputError, match=r"is not empty: it holds 0\.jsonl"):
        prepare(tmp_path, files, "text")
    with (tmp_path / "text" / "0.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(InputError, match=r"0\.jsonl:11: not JSON"):
        prepare(tmp_path, files, "broken")
    blocked = tmp_path / "file" / "out"
    blocked.parent.touch()
    with pytest.raises(StorageError, match=r"file/out cannot be written: Not a directory"):
        preparation.prepare(plan(files.replace("*", "1")), blocked, workers=1)


def test_units_of_few_documents_give_their_share_to_validation():
    for fraction, size in ((0.1, 2), (0.001, 37), (0.3, 1)):
        held = sum(preparation._is_held_out(unit, n, fraction) for unit in range(5000) for n in range(1, size + 1))
        assert held == pytest.approx(5000 * size * fraction, rel=0.02)


def test_a_file_that_was_mended_does_not_cost_what_is_done(tmp_path, files):
    """The third file is damaged: with it mended the same command goes on after the second, and gives what it gives at once."""
    damaged = tmp_path / "text" / "2.jsonl"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-20])
    with pytest.raises(InputError, match=r"2\.jsonl:10: not JSON"):
        prepare(tmp_path, files)
    assert len(json.loads((tmp_path / "out" / "progress.json").read_text())["pieces"]) == 2
    damaged.write_bytes(whole)
    for changes in ({"marks": "none"}, {"val_fraction": 0.2}, {"tokenizer": "bpe:270+eos"}):
        with pytest.raises(InputError, match="was begun with other files or options"):
            prepare(tmp_path, files, **changes)
    first = tmp_path / "text" / "0.jsonl"
    begun = first.read_bytes()
    first.write_bytes(begun + begun)
    with pytest.raises(InputError, match="was begun with other files or options"):
        prepare(tmp_path, files)
    first.write_bytes(begun)
    assert prepare(tmp_path, files).manifest == prepare(tmp_path, files, "at once").manifest


def test_options_may_be_mended_where_nothing_was_done(tmp_path, files):
    with pytest.raises(InputError, match=r"0\.jsonl:1: expected a JSON object with a string under 'body'"):
        prepare(tmp_path, files, text_key="body", tokenizer="bpe:270+eos")
    with pytest.raises(InputError, match="fewer than vocab_size=200000"):
        prepare(tmp_path, files, tokenizer="bpe:200000+eos")
    assert prepare(tmp_path, files).manifest == prepare(tmp_path, files, "at once").manifest


def test_a_tokenizer_file_with_other_ends_of_lines_is_the_same(tmp_path, files):
    made = json.dumps(json.loads(tokenizer_lib.train_bpe(DOCUMENTS, "bpe:280+eos").to_json()), indent=1)
    ids = []
    for name, end in (("lf", "\n"), ("crlf", "\r\n")):
        (tmp_path / f"{name}.json").write_bytes(made.replace("\n", end).encode())
        prepare(tmp_path, files, name, tokenizer=str(tmp_path / f"{name}.json"))
        ids.append(data.load(config(tmp_path / name)).tokenizer.id)
    assert ids[0] == ids[1]


# ---- Reading it ----


def config(*directories, **changes):
    return data.DataConfig(
        **{"source": "prepared", "files": ",".join(map(str, directories)), "tokenizer": "", "seq_len": 16} | changes
    )


DAMAGE = {
    "bit": (lambda p: _flip(p / "train.bin", 700), r"train\.bin is damaged: ids \d+ to \d+ do not match their hash"),
    "val bit": (lambda p: _flip(p / "val.bin", 3), r"val\.bin is damaged"),
    "cut": (lambda p: os.truncate(p / "train.bin", 100), r"train\.bin is damaged: it has 100 bytes, the manifest says \d+"),
    "ends cut": (lambda p: os.truncate(p / "val.ends", 8), r"val\.ends is damaged"),
    "ends bit": (lambda p: _flip(p / "train.ends", 8), r"train\.ends is damaged"),
    "gone": (lambda p: (p / "val.bin").unlink(), r"val\.bin cannot be read"),
    "manifest": (lambda p: _flip(p / "manifest.json", 40), r"manifest\.json (is damaged|cannot be read)"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "has no manifest.json, as python -m train.prepare writes one"),
    "tokenizer": (lambda p: (p / "tokenizer.json").write_text("{}"), r"tokenizer\.json cannot be read"),
    "another tokenizer": (
        lambda p: (p / "tokenizer.json").write_text(tokenizer_lib.ByteTokenizer().to_json()),
        r"tokenizer\.json .*(vocabulary|not the tokenizer of the manifest)",
    ),
}


def _flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_data_are_refused_by_name(tmp_path, files, damage, message):
    prepare(tmp_path, files)
    data.load(config(tmp_path / "out"))
    damage(tmp_path / "out")
    with pytest.raises(InputError, match=message) as error:
        data.load(config(tmp_path / "out"))
    assert "\n" not in str(error.value)


def test_processes_share_the_check_of_the_hashes(tmp_path, files):
    prepare(tmp_path, files)
    _flip(tmp_path / "out" / "train.bin", 5)

    def finds(part, parts):
        try:
            data.load(config(tmp_path / "out"), part=part, parts=parts)
        except InputError:
            return True
        return False

    assert [finds(part, 4) for part in range(4)].count(True) == 1
    data.load(config(tmp_path / "out"), splits=("val",))  # whoever evaluates does not read the training split
    assert len(data.load(config(tmp_path / "out", verify=False)).train) == 1


def test_another_tokenizer_is_refused(tmp_path, files, monkeypatch):
    prepare(tmp_path, files)
    assert data.load(config(tmp_path / "out", tokenizer="bytes+eos")).vocab_size == 257
    assert data.load(config(tmp_path / "out", tokenizer=str(tmp_path / "out" / "tokenizer.json"))).vocab_size == 257
    (tmp_path / "t.json").write_text(tokenizer_lib.ByteTokenizer().to_json())
    for spec in ("bytes", str(tmp_path / "t.json")):
        with pytest.raises(InputError, match=rf"out was prepared with another tokenizer: bytes\+eos.*, not {re.escape(spec)}"):
            data.load(config(tmp_path / "out", tokenizer=spec))
    (tmp_path / "tokenizer.json").write_text((tmp_path / "out" / "tokenizer.json").read_text())
    prepare(tmp_path, files, "named", tokenizer=str(tmp_path / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    assert data.load(config(tmp_path / "named", tokenizer="tokenizer.json")).vocab_size == 257
    (tmp_path / "tokenizer.json").write_text(tokenizer_lib.ByteTokenizer().to_json())  # the name is the manifest's still
    with pytest.raises(InputError, match=r"named was prepared with another tokenizer: tokenizer\.json, id \w+, not tokenizer"):
        data.load(config(tmp_path / "named", tokenizer="tokenizer.json"))
    prepare(tmp_path, files, "other", tokenizer="bytes", marks="newlines")
    with pytest.raises(InputError, match="other was prepared with another tokenizer than"):
        data.load(config(f"{tmp_path}/out=1", f"{tmp_path}/other=1"))


def test_a_directory_may_have_any_name(tmp_path, files):
    prepare(tmp_path, files, "lr=0.1")
    assert data.load(config(tmp_path / "lr=0.1")).weights == (1.0,)


@pytest.mark.parametrize("listed", ["a,b", "a=1,b", "a=x", "a=0", "a=-1,b=1", "=1", "a=nan", "a=1e308,b=1e308", "a=1,b=1e-320"])
def test_a_mixture_without_sensible_weights_is_refused(listed):
    with pytest.raises(InputError, match=re.escape(f"data.files={listed!r}")):
        config(listed)


def test_a_mixture_takes_each_part_s_windows_once_per_epoch_in_its_share(tmp_path, files):
    for name, letter in (("a", "a"), ("b", "b")):
        write_lines(tmp_path / f"{name}.jsonl", [letter * n for n in range(20, 60)])
        prepare(tmp_path, str(tmp_path / f"{name}.jsonl"), name)
    c = config(f"{tmp_path}/a=3", f"{tmp_path}/b=1")
    dataset = data.load(c)
    assert dataset.weights == (0.75, 0.25)
    examples = data.train_examples(dataset, seq_len=16, seed=5)
    count = [(len(tokens) - 1) // 16 for tokens in dataset.train]
    taken = [[], []]
    for n in range(4 * count[1]):  # one epoch of b
        row = examples[n].tolist()
        taken["b" in bytes(x for x in row if x < 256).decode()].append(row)
    assert len(taken[1]) == count[1]
    assert len({tuple(row) for row in taken[0][: count[0]]}) >= 2
    windows = [
        [tokens[w * 16 : w * 16 + 17].tolist() for w in range(n)] for tokens, n in zip(dataset.train, count, strict=True)
    ]
    assert sorted(taken[1]) == sorted(windows[1])
    assert sorted(taken[0][: count[0]]) == sorted(windows[0])
    batches = data.train_iterator(dataset, seq_len=16, batch_size=4, seed=5)
    other = data.train_iterator(dataset, seq_len=16, batch_size=4, seed=5)
    for _ in range(7):
        next(other)
    batches.set_state(other.get_state())
    np.testing.assert_array_equal(next(batches)["tokens"], [examples[n] for n in range(28, 32)])
    predicted = sum(batch["mask"].sum() for batch in data.val_batches(dataset, seq_len=16, batch_size=3))
    assert predicted == sum(len(tokens) - 1 for tokens in dataset.val)


def test_a_process_touches_no_more_than_its_rows(tmp_path, files, monkeypatch):
    prepare(tmp_path, files)
    dataset, read = data.load(config(tmp_path / "out")), []
    original = data._gather
    monkeypatch.setattr(data, "_gather", lambda *args, **kw: read.append(original(*args, **kw)) or read[-1])
    iterator = data.train_iterator(dataset, seq_len=16, batch_size=8, seed=0, process_index=1, process_count=4)
    for _ in range(5):
        next(iterator)
    assert sum(row.nbytes for row in read) == 5 * 2 * 17 * 4


# ---- Training on it ----


def test_a_run_on_prepared_data_resumes_and_refuses_other_data(tmp_path, files, monkeypatch):
    """Whatever the device count; the files may move."""
    directory = tmp_path / "out"
    prepare(tmp_path, files, unit_bytes=300)
    changes = {"data__source": "prepared", "data__tokenizer": "", "data__val_choice": "first", "data__seq_len": 32}
    changes |= {"model__vocab_size": 288, "quant__recipe": "none", "train__steps": 4, "train__checkpoint_every": 2}
    share_programs(monkeypatch)
    s = settings(directory, **changes, mesh__fsdp=1)
    train(s, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    directory.rename(tmp_path / "moved")
    train(settings(tmp_path / "moved", **changes, mesh__fsdp=1), tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    prepare(tmp_path, files, "other", val_fraction=0.2)
    with pytest.raises(InputError, match="was trained on other data"):
        train(settings(tmp_path / "other", **changes, mesh__fsdp=1), tmp_path / "run")
    with pytest.raises(InputError, match=r"the data's tokenizer has 257 ids, but the model's vocab_size=256"):
        loop.prepare(settings(tmp_path / "moved", **{**changes, "model__vocab_size": 256}), tmp_path / "new")
    with pytest.raises(InputError, match=r"model\.document_end=7, but what ends the data's documents is 256"):
        loop.prepare(settings(tmp_path / "moved", **changes, model__document_end=7), tmp_path / "new")


def test_the_command_line(tmp_path, files):
    output = tmp_path / "out"
    arguments = [f"--train={files}", f"--output={output}", "--tokenizer=bytes+eos", "--val_fraction=0.2", "--workers=2"]
    code, out, err = run("train.prepare", *arguments)
    assert code == 0, err
    result = json.loads(out[-1])
    assert result["train"]["documents"] + result["val"]["documents"] == 60
    assert re.fullmatch(r"0\.0 of 0\.0 MB, [\d,]+ tokens, ETA 0 s", err[-1])
    code, again, _ = run("train.prepare", *arguments)
    assert (code, json.loads(again[-1])) == (0, result)
    code, out, err = run("train.prepare", *arguments[1:])
    assert (code, out, err) == (2, [], ["error: --train=FILES, --tokenizer=NAME and --output=DIR are needed"])
