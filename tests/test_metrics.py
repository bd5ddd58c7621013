"""metrics.jsonl: rows as they come, rows past a restored step cut, broken lines dropped; progress lines on stderr."""

import json
import logging

import pytest

from train import metrics


def row(step, **figures):
    return {"step": step, "tokens": step * 10, **(figures or {"train_loss": 1.0 / step})}


def write(directory, *rows):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_rows_past_the_restored_step_are_cut(tmp_path):
    kept = [row(1), row(2), row(2, val_loss=3.0)]
    write(tmp_path, *kept, row(3), row(3, val_loss=2.0))
    writer = metrics.Metrics(tmp_path, restored_step=2)
    writer.write(row(3, train_loss=7.0))
    writer.close()
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == [*kept, row(3, train_loss=7.0)]


def test_rows_are_on_disk_at_once(tmp_path):
    writer = metrics.Metrics(tmp_path, restored_step=0)
    writer.write(row(1))
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == [row(1)]
    writer.close()


@pytest.mark.parametrize("broken", ['{"step": 2, "tok', "[1, 2]", "{}", '{"step": "2"}', "\x00\x00", "nonsense"])
def test_broken_lines_are_dropped_with_a_warning(tmp_path, caplog, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(1)) + "\n" + broken)
    with caplog.at_level(logging.WARNING):
        assert metrics.read_rows(path) == [row(1)]
    assert "broken line" in caplog.text


def test_bytes_that_are_no_text_are_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(row(1)).encode() + b"\n\xff\xfe\x80")
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == [row(1)]


def test_a_missing_file_has_no_rows(tmp_path):
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == []


def test_float_figures_survive_exactly(tmp_path):
    value = 0.1 + 0.2
    writer = metrics.Metrics(tmp_path, restored_step=0)
    writer.write(row(1, train_loss=value))
    writer.close()
    assert metrics.read_rows(tmp_path / "metrics.jsonl")[0]["train_loss"] == value


def test_progress_without_a_terminal_logs_every_n_steps_and_the_last(caplog):
    with caplog.at_level(logging.INFO), metrics.Progress(steps=5, done=0, log_every=2) as progress:
        for step in range(1, 6):
            progress.update({"step": step, "train_loss": 2.0, "tokens_per_s": 1000.0})
    assert [record.message.split()[1] for record in caplog.records] == ["2/5", "4/5", "5/5"]
