"""The ablation: cells, one compile per recipe, resume, the same grid twice, its report, bad input."""

import json
import os
import signal
import subprocess
import time
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from helpers import ROOT, command, environment
from scipy import stats

from configs import ablation_small, ablation_tiny, hypotheses, llama3_8b_mlperf
from models import llama
from train import ablation_report, cli, config, grid, loop, sharding, step
from train.errors import InputError
from train.metrics import read_rows


def section(**changes):
    s = grid.default_section()
    s.update(rows=("fp8_current", "mxfp4"), seeds=(3, 5), **changes)
    return s


def test_the_cells_of_a_grid():
    cells = grid.cells(section(horizons=(0.5,), horizon_seeds=1, perturbed=("mxfp4",)))
    assert [(c.label, c.seed, c.arm, c.share) for c in cells] == [
        ("fp8_current", 3, "", 1.0),
        ("fp8_current", 5, "", 1.0),
        ("fp8_current", 3, "horizon", 0.5),
        ("mxfp4", 3, "", 1.0),
        ("mxfp4", 5, "", 1.0),
        ("mxfp4", 3, "perturbed", 1.0),
        ("mxfp4", 5, "perturbed", 1.0),
    ]
    assert len({c.path for c in cells}) == len(cells)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ()}, "must not be empty"),
        ({"rows": ("mxfp4", "mxfp4")}, "hold anything twice"),
        ({"seeds": (1, 1)}, "hold anything twice"),
        ({"baseline": "mxfp5"}, "'mxfp5' is no row"),
        ({"perturbed": ("none",)}, "'none' is no row"),
        ({"contrasts": (("mxfp4", "mxfp5"),)}, "'mxfp5' is no row"),
        ({"rows": ("fp8_current", ("my row", "mxfp4"), ("my_row", "mxfp4_sr"))}, "two cells would share cells/my_row/seed3"),
        ({"horizons": (0.5, 0.5)}, "two cells would share cells/fp8_current/seed3-horizon0.5"),
        ({"horizons": ("0.5",)}, "horizons=.* must be numbers"),
        ({"seeds": (1, "2")}, "seeds=.* must be numbers"),
        ({"contrasts": (("mxfp4",),)}, "must be pairs of labels"),
        *(
            ({"rows": ("fp8_current", row)}, r"ablate.rows: .* is no recipe, \(label, recipe\)")
            for row in (
                3,
                (),
                ("mine",),
                ("..", "mxfp4"),
                ("mine", "mxfp4", (0.5, "none")),
                ("mine", "mxfp4", (("1", "none"),)),
            )
        ),
    ],
)
def test_a_grid_that_cannot_be_is_refused(changes, message):
    s = section()
    s.update(changes)
    with pytest.raises(InputError, match=message):
        grid.cells(s)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ("fp8_current", ("mine", "mxfp4:rule=ceil"))}, "seed3 ran with recipe mxfp4, not mxfp4:rule=ceil"),
        ({"rows": ("fp8_current", ("mine", "mxfp4", ((0.5, "fp8_current"),)))}, "ran with schedule .*0.9.*, not .*0.5"),
        ({"perturb": 1e-6}, "seed3-perturbed ran with perturb 1e-07, not 1e-06"),
    ],
)
@pytest.mark.parametrize("name", ["result.json", "asked.json"])
def test_a_cell_of_another_recipe_is_not_taken_for_the_rows(changes, message, name, tmp_path):
    c = ablation_tiny.get_config("smoke")
    c.ablate.update(rows=("fp8_current", ("mine", "mxfp4", ((0.9, "fp8_current"),))), perturbed=("mine",), seeds=(3,))
    for cell in grid.cells(c.ablate):
        loop.write_json(tmp_path / cell.path / name, grid._asked(c, cell))
    grid.check_begun(c, grid.cells(c.ablate), tmp_path)
    c.ablate.update(changes)
    with pytest.raises(InputError, match=message):
        grid.check_begun(c, grid.cells(c.ablate), tmp_path)


@pytest.mark.parametrize("argument", ["", "full", "smoke"])
def test_every_row_of_the_shipped_grids_resolves(argument):
    c = ablation_tiny.get_config(argument)
    for cell in grid.cells(c.ablate):
        settings = grid.settings_of(c, cell)
        loop.check_fits(settings)
        assert settings.train.seed == cell.seed
        assert settings.train.steps == round(c.train.steps * cell.share) == settings.optimizer.decay_steps
    floor = grid.settings_of(c, grid.Cell(*ablation_tiny.with_rule("mxfp4_h16", "floor"), seed=0)).numerics.recipe
    assert {s.scale_rule for g in (floor.fprop, floor.dgrad, floor.wgrad) for s in (g.lhs, g.rhs)} == {"floor"}


@pytest.mark.parametrize(("module", "millions"), [(ablation_small, 30), (llama3_8b_mlperf, 8030)])
def test_the_grids_for_gpus_resolve(module, millions):
    c = module.get_config()
    cells = grid.cells(c.ablate)
    assert len({cell.label for cell in cells}) == 12
    for cell in cells:
        settings = grid.settings_of(c, cell)
    assert round(llama.num_params(settings.model) / 1e6) == millions


def test_a_row_that_does_not_fit_is_found_before_any_runs(tmp_path):
    arguments = ["--config=configs/ablation_tiny.py:smoke", "--config.model.d_ff=80", f"--workdir={tmp_path}/grid"]
    code, out, err = helpers.run("train.ablate", *arguments)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith("error: row mxfp4_h16: mlp/gate dgrad: d_ff per device = 80 is not a multiple of 32")
    assert not (tmp_path / "grid").exists()


def test_the_protocol_of_the_study():
    s = config.resolve(llama3_8b_mlperf.get_config("fp8_delayed"))
    assert (s.train.batch_size, s.data.seq_len, s.train.target_loss) == (32, 8192, 3.3)
    assert s.train.eval_every * s.train.batch_size == 12_288
    assert s.train.steps * s.train.batch_size > 196_608
    o = s.optimizer
    assert (o.peak_lr, o.warmup_steps, o.decay_steps, o.b1, o.b2, o.eps) == (8e-4, 128, 1_200_000, 0.9, 0.95, 1e-5)
    assert (o.weight_decay, o.clip_norm, s.model.rope_theta, s.model.rope_scaling) == (0.1, 1.0, 500_000, "none")
    assert s.model.init_std == 0.02


def test_tokens_to_a_target_are_compared_where_there_is_one(tmp_path):
    c = ablation_tiny.get_config("smoke").unlock()
    c.ablate.update(rows=("fp8_current", "mxfp4", "mxfp4_h16"), seeds=(0,), perturbed=(), horizons=())
    c.train.target_loss = 2.0
    curves = {"fp8_current": (3.0, 2.0), "mxfp4": (3.0, 2.5, 2.0), "mxfp4_h16": (3.0, 2.5, 2.2)}
    for cell in grid.cells(c.ablate):
        result = {"val_loss": curves[cell.label][-1], "val_loss_unquantized": 1.0, "diverged": None}
        loop.write_json(tmp_path / cell.path / "result.json", result)
        rows = [
            {"step": i, "tokens": 100 * (i + 1), "val_loss": v, "tokens_per_s": 10.0} for i, v in enumerate(curves[cell.label])
        ]
        (tmp_path / cell.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = ablation_report.analyse(tmp_path, c.ablate, grid.cells(c.ablate), target=2.0)
    assert results["rows"]["mxfp4"]["overhead_crossing"]["mean"] == 0.5
    assert results["rows"]["mxfp4_h16"]["did_not_reach"] == 1
    for row, rate, expected in (("mxfp4", 1.2, "+25.0% at 1.200 × the tokens/s"), ("mxfp4_h16", 1.2, "did not reach")):
        figures = {**results["rows"][row], "throughput_ratio": rate}
        assert ablation_report._time_to_target({"run": {"emulated": False}}, figures) == expected
        assert ablation_report._time_to_target({"run": {"emulated": True}}, figures) == "emulated, not a speed"
    ablation_report.write(tmp_path, c, grid.cells(c.ablate), tmp_path)
    assert "extra tokens to 2" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("question", hypotheses.QUESTIONS)
def test_every_row_of_a_question_resolves_and_shares_its_cells_with_the_others(question):
    c = hypotheses.get_config(question)
    tiny = {cell.label: cell for cell in grid.cells(ablation_tiny.get_config("full").ablate)}
    digests = {}
    for cell in grid.cells(c.ablate):
        settings = grid.settings_of(c, cell)
        loop.check_fits(settings)
        if cell.label in tiny:
            assert (cell.recipe, cell.schedule) == (tiny[cell.label].recipe, tiny[cell.label].schedule)
        digests.setdefault(cell.label, (settings.numerics.recipe.digest(), *(phase.start for phase in settings.schedule)))
    assert len(set(digests.values())) == len(digests)
    own = {k: v for k, v in c.to_dict().items() if k != "ablate"}
    assert own == {k: v for k, v in ablation_tiny.get_config().to_dict().items() if k != "ablate"}


def test_a_row_may_have_a_schedule():
    c = hypotheses.get_config("h")
    settings = {cell.label: grid.settings_of(c, cell) for cell in grid.cells(c.ablate)}
    assert [(p.start, p.name) for p in settings["mxfp4_healed"].schedule] == [(540, "fp8_current")]
    assert settings["mxfp4_healed"].numerics.recipe == settings["mxfp4"].numerics.recipe


def test_contrasts_are_paired_between_rows(tmp_path):
    c = ablation_tiny.get_config("smoke").unlock()
    c.ablate.update(rows=("fp8_current", "mxfp4", "mxfp4_h16"), seeds=(0, 1), perturbed=(), horizons=())
    c.ablate.contrasts = (("mxfp4_h16", "mxfp4"),)
    losses = {"fp8_current": (1.0, 2.0), "mxfp4": (1.5, 2.6), "mxfp4_h16": (1.4, 2.3)}
    plain = {**losses, "mxfp4": (1.4, 2.4)}
    for cell in grid.cells(c.ablate):
        result = {
            "val_loss": losses[cell.label][cell.seed],
            "val_loss_unquantized": plain[cell.label][cell.seed],
            "diverged": None,
        }
        loop.write_json(tmp_path / cell.path / "result.json", result)
        (tmp_path / cell.path / "metrics.jsonl").write_text('{"step": 1, "tokens": 9, "val_loss": 2.0, "grad_norm": 1.0}\n')
    ablation_report.write(tmp_path, c, grid.cells(c.ablate), tmp_path / "report")
    (contrast,) = json.loads((tmp_path / "report" / "results.json").read_text())["contrasts"]
    assert (contrast["row"], contrast["other"], contrast["seeds"]) == ("mxfp4_h16", "mxfp4", 2)
    assert contrast["mean"] == pytest.approx(-0.2)
    assert contrast["unquantized"]["mean"] == pytest.approx(-0.05)
    assert contrast["p"] == pytest.approx(2 * stats.t.sf(2.0, 1))
    assert "| mxfp4_h16 | mxfp4 | -0.2000 (-1.4706 to +1.0706) | 0.295 | 2 |" in (tmp_path / "report" / "report.md").read_text()


def test_seeds_are_one_program_with_their_own_weights_and_bits(tmp_path):
    corpus = helpers.write_corpus(tmp_path)
    a, b = (helpers.settings(corpus, quant__recipe="mxfp4_sr", train__seed=seed) for seed in (1, 2))
    mesh = sharding.make_mesh(a.mesh)
    train_step, other_step = step.make_train_step(a, mesh), step.make_train_step(b, mesh)
    tokens = helpers.tokens(a)
    states = [step.init_state(s, mesh) for s in (a, b)]
    assert [tuple(np.asarray(s.seed)) for s in states] == [(1, 0), (2, 0)]
    alone = float(other_step(step.init_state(b, mesh), tokens)[1]["train_loss"])
    losses = [float(train_step(state, tokens)[1]["train_loss"]) for state in states]
    assert train_step._cache_size() == 1
    assert losses[1] == alone
    assert losses[0] != losses[1]


def test_a_perturbation_moves_every_weight_a_little_and_depends_on_the_seed(tmp_path):
    s = helpers.settings(helpers.write_corpus(tmp_path))
    state = step.init_state(s, sharding.make_mesh(s.mesh))
    moved = step.perturb(state, 1e-3)
    for before, after in zip(*(jax.tree.leaves(x.params) for x in (state, moved)), strict=True):
        ratio = np.asarray(after) / np.asarray(before) - 1
        assert 0.5e-3 < ratio.std() < 2e-3
    again = step.perturb(state, 1e-3)
    assert all(np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(x.params) for x in (moved, again)), strict=True))


def run(workdir, *more):
    done = subprocess.run(
        command("train.ablate", "--config=configs/ablation_tiny.py:smoke", f"--workdir={workdir}", *more),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def losses(workdir):
    return {
        str(path.parent.relative_to(workdir)): [
            {k: v for k, v in row.items() if k != "tokens_per_s"} for row in read_rows(path)
        ]
        for path in sorted(workdir.glob("cells/*/*/metrics.jsonl"))
    }


def test_smoke_twice_is_bit_identical_whether_killed_or_not_and_reports(tmp_path):
    result = run(tmp_path / "one", "--jobs=2")
    assert (result["finished"], result["cells"]) == (5, 5)
    other, fewer = tmp_path / "other", ("--jobs=1", "--config.ablate.horizons=()")
    arguments = command("train.ablate", "--config=configs/ablation_tiny.py:smoke", f"--workdir={other}", *fewer)
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment(), process_group=0, stdout=subprocess.DEVNULL)
    row = other / "cells" / "fp8_current" / "seed0" / "metrics.jsonl"
    while process.poll() is None and not (row.exists() and len(read_rows(row)) > 12):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    assert process.wait() == 130
    assert any((row.parent / "checkpoints").iterdir())
    assert "0 of 3 cells finished" in (other / "report.md").read_text()
    run(other, *fewer)
    one = losses(tmp_path / "one")
    assert losses(other) == {cell: rows for cell, rows in one.items() if "horizon" not in cell}
    assert (len(losses(other)), len(one)) == (3, 5)

    report = tmp_path / "one"
    results = json.loads((report / "results.json").read_text())
    assert set(results["rows"]) == {"fp8_current", "mxfp4_h16"}
    assert results["rows"]["fp8_current"]["difference"]["mean"] == 0
    assert results["rows"]["mxfp4_h16"]["study"] == "8–9 %"
    assert results["perturbation"]["fp8_current"]["runs"] == 1
    page = (report / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "emulated" in page
    assert (report / "report.md").read_text().count("\n| ") == 3
    for name in ("curves.png", "curves_zoomed.png", "grad_norm.png", "error_fprop.png", "error_dgrad.png", "error_wgrad.png"):
        assert (report / name).read_bytes().startswith(b"\x89PNG")


def test_a_row_that_diverged_keeps_its_place(tmp_path, monkeypatch):
    c = ablation_tiny.get_config("smoke")
    cells = [cell for cell in grid.cells(c.ablate) if cell.arm == ""]
    monkeypatch.setattr(loop.Run, "train", lambda *_: (_ for _ in ()).throw(loop.GuardError("step 3: loss=nan")))
    for cell in cells:
        grid.run_row(c, [cell], tmp_path, helpers.NoStop())
    results = ablation_report.analyse(tmp_path, c.ablate, cells)
    assert {row["diverged"] for row in results["rows"].values()} == {1}
    ablation_report.write(tmp_path, c, cells, tmp_path)
    assert "1 diverged" in (tmp_path / "report.md").read_text()


def test_a_worker_helps_with_another_ones_row_and_leaves_its_cells(tmp_path, monkeypatch):
    c: Any = ablation_tiny.get_config("smoke").unlock()
    c.ablate.update(rows=("fp8_current",), seeds=(0, 1, 2, 3), perturbed=(), horizons=())
    cells = grid.cells(c.ablate)
    ran: list[str] = []

    def run_cell(_config, cell, directory, *_):
        ran.append(directory.name)
        loop.write_json(directory / "result.json", {})

    monkeypatch.setattr(grid, "_run_cell", run_cell)
    row = tmp_path / "cells" / "fp8_current"
    for cell in cells:
        (tmp_path / cell.path).mkdir(parents=True)
    loop.write_json(row / "seed2" / "result.json", {})
    with cli.lock_file(row.with_name("fp8_current.lock")), cli.lock_file(row / "seed1.lock"):
        assert grid.work(c, cells, tmp_path) == 0
    assert ran == ["seed3", "seed0"]
    assert grid.work(c, cells, tmp_path) == 0
    assert ran == ["seed3", "seed0", "seed1"]


def test_cells_that_others_still_run_are_said_to_be_left(tmp_path):
    workdir = tmp_path / "grid"
    locked = [cli.lock_file(workdir / f"{cell.path}.lock") for cell in grid.cells(ablation_tiny.get_config("smoke").ablate)]
    arguments = ["--config=configs/ablation_tiny.py:smoke", "--workdir", str(workdir), "--jobs", "1"]
    code, out, err = helpers.run("train.ablate", *arguments)
    for file in locked:
        assert file is not None
        file.close()
    assert (code, json.loads(out[-1])["finished"]) == (2, 0)
    assert err[-1] == "error: 5 cells are still run by others, cells/fp8_current/seed0 first: run this again later"


def test_bad_input_is_one_line(tmp_path):
    done = subprocess.run(
        command("train.ablate", "--config=configs/tiny_cpu.py", f"--workdir={tmp_path / 'x'}"),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "error: the config has no `ablate` section: see configs/ablation_tiny.py\n")
    run(tmp_path / "grid", "--report_only")
    done = subprocess.run(
        command("train.ablate", "--config=configs/ablation_tiny.py", f"--workdir={tmp_path / 'grid'}", "--report_only"),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "another config" in done.stderr
    assert config.resolve(ablation_tiny.get_config("smoke")).train.steps == 30
