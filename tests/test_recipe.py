"""Recipes: the published ladder operand by operand, validation, overrides, round trips, digests; imports point down only."""

import ast
import dataclasses
import itertools
import json
import pathlib

import pytest

from fp4jax import GemmSpec, OperandSpec, Recipe, Rotation, formats, recipe, recipes
from fp4jax import __main__ as cli

E4M3, E5M2 = "fp8_e4m3.tensor.amax.rne", "fp8_e5m2.tensor.amax.rne"
M, MSR = "mxfp4.1x32.even.rne", "mxfp4.1x32.even.sr"
FP8_ROWS = {"fprop": (E4M3, E4M3, "-"), "dgrad": (E5M2, E4M3, "-"), "wgrad": (E4M3, E5M2, "-")}


def rows(fprop, dgrad=None, wgrad=None):
    """Return one row per GEMM; None stands for FP8."""
    return {g: row or FP8_ROWS[g] for g, row in zip(recipe.GEMMS, (fprop, dgrad, wgrad), strict=True)}


# What each operand is, in the order x·w, dy·w, x·dy.
LADDER = {
    "none": rows(*[("none", "none", "-")] * 3),
    "bf16": rows(*[("bf16", "bf16", "-")] * 3),
    "fp8_current": FP8_ROWS,
    "mxfp4_fprop": rows((M, M, "-")),
    "mxfp4_fprop_dgrad": rows((M, M, "-"), (M, M, "-")),
    "mxfp4": rows((M, M, "-"), (M, M, "-"), (M, M, "-")),
    "mxfp4_fprop_sr": rows((MSR, MSR, "-")),
    "mxfp4_fprop_dgrad_sr": rows((MSR, MSR, "-"), (MSR, MSR, "-")),
    "mxfp4_sr": rows((MSR, MSR, "-"), (MSR, MSR, "-"), (MSR, MSR, "-")),
    "mxfp4_sr_grad": rows((M, M, "-"), (MSR, M, "-"), (M, MSR, "-")),
    "mxfp4_fprop_rht16": rows((M, M, "H16r")),
    "mxfp4_fprop_dgrad_rht16": rows((M, M, "H16r"), (M, M, "H16r")),
    "mxfp4_rht16": rows((M, M, "H16r"), (M, M, "H16r"), (M, M, "H16r")),
    "mxfp4_rht16_fixed": rows((M, M, "H16f"), (M, M, "H16f"), (M, M, "H16f")),
    "mxfp4_h16": rows((M, M, "H16d"), (M, M, "H16d"), (M, M, "H16d")),
    "mxfp4_h32": rows((M, M, "H32d"), (M, M, "H32d"), (M, M, "H32d")),
    "mxfp4_h16_wgrad": rows((M, M, "-"), (M, M, "-"), (M, M, "H16d")),
}

D4, D5, MX8 = "fp8_e4m3.tensor.delayed.rne", "fp8_e5m2.tensor.delayed.rne", "mxfp8_e4m3.1x32.ceil.rne"
B, B2 = "fp8_e4m3.1x128.amax.rne", "fp8_e4m3.128x128.amax.rne"
FLOOR, M2, M34 = "mxfp4.1x32.floor.rne", "mxfp4.32x32.even.rne", "mxfp4.1x32.floor_3_4.sr"
CEIL, CEIL_SR, QUEST = "mxfp4.1x32.ceil.rne", "mxfp4.1x32.ceil.sr", "mxfp4.1x32.quest.rne"
N, NSR, N2 = "nvfp4.1x16.two_level.rne", "nvfp4.1x16.two_level.sr", "nvfp4.16x16.two_level.rne"
N46, N46_2, EDEN = "nvfp4.1x16.four_over_six.rne", "nvfp4.16x16.four_over_six.rne", "nvfp4.1x16.eden.eden"
N1, N1SR, OF_FPROP = "nvfp4.1x16.single_level.rne", "nvfp4.1x16.single_level.sr", "(of fprop's)"
OTHERS = {
    "fp8_delayed": rows((D4, D4, "-"), (D5, D4, "-"), (D4, D5, "-")),
    "fp8_block": rows((B, B2, "-"), (B, B2, "-"), (B, B, "-")),
    "mxfp8": rows((MX8, MX8, "-"), (MX8, MX8, "-"), (MX8, MX8, "-")),
    "mx_baseline": rows((FLOOR, FLOOR, "-"), (FLOOR, FLOOR, "-"), (FLOOR, FLOOR, "-")),
    "amd_jax_aiter": rows((M, M, "-"), (M, M, "-"), (M, MSR, "H16d")),
    "amd_primus_turbo": rows((M, M2, "-"), (M, M2, "-"), (M, M, "H16d")),
    "lumen_mxfp4": rows((M, M2, "-"), (MSR, M2, "-"), (M, MSR, "H16d")),
    "tseng_mxfp4": rows(("bf16", "bf16", "-"), (M34, M34, "H64r"), (M34, M34, "H64r")),
    "nvidia_nvfp4": rows((N, N2, "-"), (NSR, N2, "-"), (N, NSR, "H16f")),
    "nvidia_nvfp4_four_over_six": rows((N46, N46_2, "-"), (NSR, N46_2, "-"), (N46, NSR, "H16f")),
    "quartet": rows((QUEST, QUEST, "H32d"), (M34, M34 + OF_FPROP, "H32r"), (M34 + OF_FPROP, M34, "H32r")),
    "quartet2": rows((N46, N46, "-"), (EDEN, EDEN + OF_FPROP, "H128r"), (EDEN + OF_FPROP, EDEN, "H128r")),
    "tetrajet": rows((CEIL, CEIL, "-"), (CEIL_SR, CEIL_SR + OF_FPROP, "-"), (CEIL_SR + OF_FPROP, CEIL_SR, "-")),
    "mxfp4_mean_split": rows((M, M, "-"), (M, M, "-"), (M, M, "-")),
    "fp4_all_the_way": rows((N1, N1, "-"), (N1SR, N1, "-"), (N1SR, N1SR, "-")),
}
PUBLISHED = LADDER | OTHERS
PADDED = {"fp8_block": recipe.GEMMS, "tseng_mxfp4": ("dgrad", "wgrad"), "quartet2": ("dgrad", "wgrad")}
SPLIT = {"mxfp4_mean_split": "mean"}


@pytest.mark.parametrize("name", recipes.names())
def test_every_published_recipe_operand_by_operand(name):
    r = recipes.get(name)
    assert {g: tuple(map(str, (s.lhs, s.rhs, s.rotation))) for g in recipe.GEMMS for s in [getattr(r, g)]} == PUBLISHED[name]
    assert tuple(g for g in recipe.GEMMS if getattr(r, g).pad) == PADDED.get(name, ())
    assert {getattr(r, g).split for g in recipe.GEMMS} == {SPLIT.get(name, "none")}
    assert r.needs_key == any(word in str(PUBLISHED[name]) for word in (".sr", ".eden", "r')"))
    assert r.needs_history == (name == "fp8_delayed")
    assert r.is_plain == (name == "none")
    entry = recipes.ENTRIES[name]
    assert entry.summary
    assert entry.source
    assert entry.keep_last == (0.15 if name.startswith(("nvidia_nvfp4", "lumen")) else 0)
    assert name in recipes.names()


def test_all_recipes_differ_and_print():
    contents = [recipes.get(n) for n in recipes.names()]
    assert len(set(contents)) == len(contents)
    assert len({r.digest() for r in contents}) == len(contents)
    assert str(recipes.get("mxfp4_h16_wgrad")).splitlines()[2] == f"wgrad: {M} × {M} H16d"


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"'mxfp4_h61'.*'mxfp4_h16'"):
        recipes.get("mxfp4_h61")
    with pytest.raises(ValueError, match="fp4jax list shows all"):
        recipes.get("zzz")


def test_defaults_live_in_the_formats():
    assert OperandSpec() == OperandSpec("none", 0, "none", "none")
    assert OperandSpec("mxfp4") == OperandSpec("mxfp4", 32, "even", "rne") == OperandSpec("mxfp4", scale_rule="EVEN")
    assert OperandSpec("fp8_e5m2") == OperandSpec("fp8_e5m2", 0, "amax", "rne")
    assert OperandSpec("bf16") == OperandSpec("bf16", 0, "none", "rne")
    assert Rotation(16) == Rotation(16, "deterministic")
    assert Rotation() == Rotation(0, "none")
    assert OperandSpec("mxfp4").element is formats.E2M1
    assert OperandSpec("bf16").element is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OperandSpec("fp4"), "unknown format='fp4'"),
        (lambda: OperandSpec("mxfp4", block=16), "block=16"),
        (lambda: OperandSpec("mxfp4", block=32.0), "block=32.0"),
        (lambda: OperandSpec("mxfp4", block="32"), "block='32'"),
        (lambda: OperandSpec("mxfp4", block=True), "block=True"),
        (lambda: OperandSpec("fp8_e4m3", block=32), "block=32"),
        (lambda: OperandSpec("fp8_e4m3", block=False), "block=False"),
        (lambda: OperandSpec("mxfp4", scale_rule="amax"), "scale_rule='amax'"),
        (lambda: OperandSpec("mxfp4", scale_rule="round"), "scale_rule='round'"),
        (lambda: OperandSpec("fp8_e4m3", scale_rule="even"), "scale_rule='even'"),
        (lambda: OperandSpec("mxfp4", rounding="nearest"), "rounding='nearest'"),
        (lambda: OperandSpec("none", rounding="sr"), "rounding='sr'"),
        (lambda: OperandSpec("none", rounding="rne"), "rounding='rne'"),
        (lambda: OperandSpec("bf16", rounding="sr"), "rounding='sr'"),
        (lambda: OperandSpec("bf16", scale_rule="even"), "scale_rule='even'"),
        (lambda: Rotation(12), "size=12"),
        (lambda: Rotation(1), "size=1 "),
        (lambda: Rotation(-16), "size=-16"),
        (lambda: Rotation(16.0), "size=16.0"),
        (lambda: Rotation(True), "size=True"),
        (lambda: Rotation(16, "random"), "signs='random'"),
        (lambda: Rotation(16, "none"), "signs='none'"),
        (lambda: Rotation(0, "fixed"), "signs='fixed'"),
        (lambda: GemmSpec(rotation=Rotation(16)), "rotation H16d"),
        (lambda: GemmSpec(OperandSpec("bf16"), OperandSpec("bf16"), Rotation(16)), "rotation H16d"),
        (lambda: GemmSpec(pad=True), "pad=True"),
        (lambda: GemmSpec(OperandSpec("fp8_e4m3"), pad=True), "pad=True"),
        (lambda: GemmSpec(OperandSpec("mxfp4"), pad=1), "pad=1"),
        (lambda: OperandSpec("mxfp4", across=16), "across=16"),
        (lambda: OperandSpec("fp8_e4m3", across=128), "across=128"),
        (lambda: OperandSpec("mxfp4", scale_rule="quest", across=32), "across=32"),
        (lambda: OperandSpec("mxfp4", scale_rule="mse", rounding="sr"), "rounding='sr'"),
        (lambda: OperandSpec("fp8_e4m3", block=128, scale_rule="delayed"), "delayed"),
        (lambda: OperandSpec("none", source="fprop"), "source='fprop'"),
        (lambda: GemmSpec(OperandSpec("nvfp4", scale_rule="eden")), "rotation of size 128"),
        (lambda: GemmSpec(OperandSpec("mxfp4"), split="half"), "split='half'"),
        (lambda: GemmSpec(split="mean"), "split='mean'"),
        (lambda: GemmSpec(OperandSpec("mxfp4"), split="first"), "without a rotation"),
        (lambda: GemmSpec(OperandSpec("mxfp4", scale_rule="quest"), split="mean"), "quest"),
        (lambda: Recipe(fprop=GemmSpec(OperandSpec("mxfp4", source="fprop"))), "fprop itself"),
        (lambda: Recipe(wgrad=GemmSpec(rhs=OperandSpec("mxfp4", source="fprop"))), "dy"),
        (lambda: Recipe(wgrad=GemmSpec(OperandSpec("mxfp4", source="fprop"))), "an operand that fprop quantizes"),
        (lambda: recipes.parse("tetrajet:fprop.split=mean"), "fprop splits its operands"),
    ],
)
def test_a_value_that_does_not_apply_raises(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_contraction_multiple_is_that_of_blocks_and_rotation():
    mx, fp8 = OperandSpec("mxfp4"), OperandSpec("fp8_e4m3")
    assert GemmSpec().multiple == GemmSpec(fp8, fp8).multiple == 1
    assert GemmSpec(fp8, fp8, Rotation(16)).multiple == 16
    assert GemmSpec(mx, fp8).multiple == GemmSpec(fp8, mx).multiple == GemmSpec(mx, mx, Rotation(16)).multiple == 32
    assert GemmSpec(mx, mx, Rotation(64)).multiple == 64


def test_specs_are_frozen_and_hashable():
    r = recipes.get("mxfp4_sr")
    assert hash(r) == hash(recipe.from_dict(r.to_dict()))
    for node, field in ((r, "fprop"), (r.fprop, "lhs"), (r.fprop.lhs, "format"), (r.fprop.rotation, "size")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(node, field, None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_dictionaries_round_trip(name):
    r = recipes.get(name)
    assert recipe.from_dict(r.to_dict()) == r
    assert recipe.from_dict(r.to_dict()).digest() == r.digest()
    assert dict(recipe.leaves(r))["wgrad.rhs.format"] == r.wgrad.rhs.format
    assert len(list(recipe.leaves(r))) == 3 * (6 + 6 + 2 + 2)


def walk(tree, prefix=()):
    for name, value in tree.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from walk(value, (*prefix, name))


PATHS = list(walk(recipes.get("mxfp4").to_dict()))


def without(tree, path):
    head, *rest = path
    return {k: without(v, rest) if k == head else v for k, v in tree.items() if rest or k != head}


def test_a_missing_key_raises():
    accepted = []
    for path in PATHS:
        try:
            recipe.from_dict(without(recipes.get("mxfp4").to_dict(), path))
            accepted.append(".".join(path))
        except (TypeError, ValueError):
            pass
        except KeyError:
            accepted.append(f"{'.'.join(path)} (KeyError)")
    assert accepted == []


@pytest.mark.parametrize("path", [p for p in PATHS if len(p) < 3 and p[-1] not in ("pad", "split")] + [()], ids=".".join)
def test_an_unknown_key_raises(path):
    tree = recipes.get("mxfp4").to_dict()
    node = tree
    for name in path:
        node = node[name]
    node["extra"] = 1
    with pytest.raises((TypeError, ValueError)):
        recipe.from_dict(tree)


def test_digest_is_stable_and_sees_every_leaf():
    assert recipes.get("none").digest() == Recipe().digest()
    assert all(len(recipes.get(n).digest()) == 12 for n in recipes.names())
    base = recipes.get("mxfp4_h16")
    changes = {"format": "fp8_e4m3", "scale_rule": "floor", "rounding": "sr", "size": 32, "signs": "fixed", "pad": True}
    digests = {base.digest()}
    for path, _ in recipe.leaves(base):
        leaf = path.rsplit(".", 1)[1]
        if leaf in changes:
            digests.add(recipe.override(base, {path: changes[leaf]}).digest())
    assert len(digests) == 1 + 3 * (2 * 3 + 3)


def test_override_replaces_leaves_and_resets_what_belongs_to_them():
    base = recipes.get("mxfp4_rht16")
    changed = recipe.override(base, {"dgrad.lhs.rounding": "sr", "wgrad.rotation.signs": "fixed", "fprop.pad": True})
    assert changed == Recipe(
        dataclasses.replace(base.fprop, pad=True),
        dataclasses.replace(base.dgrad, lhs=OperandSpec("mxfp4", rounding="sr")),
        dataclasses.replace(base.wgrad, rotation=Rotation(16, "fixed")),
    )
    assert base == recipes.get("mxfp4_rht16")  # untouched
    assert recipe.override(base, {}) == base
    sr = recipes.get("mxfp4_sr")
    assert recipe.override(sr, {"fprop.lhs.format": "fp8_e4m3"}).fprop.lhs == OperandSpec("fp8_e4m3")
    both = {"fprop.lhs.rounding": "sr", "fprop.lhs.format": "fp8_e4m3"}
    for items in itertools.permutations(both.items()):
        assert recipe.override(sr, dict(items)).fprop.lhs == OperandSpec("fp8_e4m3", rounding="sr")
    assert recipe.override(sr, {"fprop.lhs.format": "mxfp4"}) == sr  # the same format resets nothing
    assert recipe.override(base, {"fprop.rotation.size": 0}).fprop.rotation == Rotation()
    assert recipe.override(base, {"fprop.rotation.size": 32}).fprop.rotation == Rotation(32)
    sized = recipe.override(base, {"fprop.rotation.size": 32, "fprop.rotation.signs": "redrawn"})
    assert sized.fprop.rotation == Rotation(32, "redrawn")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("fprop.lhs.colour", "red", "unknown recipe leaf 'fprop.lhs.colour'"),
        ("forward.lhs.format", "mxfp4", "unknown recipe leaf"),
        ("fprop.lhs", "mxfp4", "unknown recipe leaf 'fprop.lhs'"),
        ("fprop", "mxfp4", "unknown recipe leaf 'fprop'"),
        ("fprop.lhs.format.name", "mxfp4", "unknown recipe leaf"),
        ("", "mxfp4", "unknown recipe leaf"),
        ("fprop.lhs.block", 16, "block=16"),
        ("fprop.rotation.signs", "fixed", "signs='fixed'"),
    ],
)
def test_override_refuses_what_does_not_exist_or_apply(path, value, message):
    with pytest.raises(ValueError, match=message):
        recipe.override(recipes.get("mxfp4"), {path: value})


def test_round_to_nearest_takes_the_draws_out_of_the_casts_only():
    assert recipe.round_to_nearest(recipes.get("mxfp4_sr")) == recipes.get("mxfp4")
    assert recipe.round_to_nearest(recipes.get("mxfp4_sr_grad")) == recipes.get("mxfp4")
    assert recipe.round_to_nearest(recipes.get("mxfp4_rht16")) == recipes.get("mxfp4_rht16")


# ------------------------------------------------------------------------------------------------- layers

ROOT = pathlib.Path(__file__).parent.parent
LAYERS = {
    0: ("formats", "recipe", "recipes"),
    1: ("rounding", "bits", "rotation", "ops.qtensor"),
    2: ("ops.quantize",),
    3: ("dot",),
    4: ("numerics", "linen"),
}
LEVEL = {f"fp4jax.{name}": level for level, names in LAYERS.items() for name in names}


def imports(file):
    """Return the dotted names that a file imports, anywhere in it, `from a import b` as both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {file}"
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return found


def test_imports_point_down_only():
    files = {
        f"fp4jax.{'.'.join(f.relative_to(ROOT / 'fp4jax').with_suffix('').parts)}": f for f in (ROOT / "fp4jax").rglob("*.py")
    }
    assert set(LEVEL) <= set(files)
    for module, file in files.items():
        names = imports(file)
        tops = {n.split(".")[0] for n in names}
        assert not tops & {"models", "train", "configs", "tests"}, module
        if module not in ("fp4jax.linen", "fp4jax.nnx"):
            assert "flax" not in tops, f"{module} imports flax"
        if LEVEL.get(module) == 0:
            assert not tops & {"jax", "jaxlib"}, f"{module} imports jax"
        if module in LEVEL:
            higher = {n for n in names if LEVEL.get(n, -1) > LEVEL[module]}
            assert not higher, f"{module} imports {higher} from above"


def test_the_model_knows_nothing_of_fp4():
    for file in (ROOT / "models").rglob("*.py"):
        assert not {n.split(".")[0] for n in imports(file)} & {"fp4jax", "train", "configs"}, file


# ---- Recipes as text, and the command line ----


def test_recipes_are_read_from_text():
    h16 = recipes.get("mxfp4_h16")
    assert recipes.parse("mxfp4_h16") == h16
    mixed = recipes.parse("mxfp4_h16:fprop=bf16,wgrad.lhs.rounding=sr,wgrad.rotation.size=32,dgrad.pad=true")
    assert mixed.fprop == recipes.get("bf16").fprop
    assert (mixed.wgrad.lhs.rounding, mixed.wgrad.rotation.size, mixed.dgrad.pad) == ("sr", 32, True)
    assert recipes.parse(":dgrad=fp8_current", h16) == dataclasses.replace(h16, dgrad=recipes.get("fp8_current").dgrad)
    assert recipes.parse("bf16", h16) == recipes.get("bf16")
    for text in (
        "",
        ":fprop=bf16",
        "mxfp4_h61",
        "mxfp4:fprop",
        "mxfp4:fprop.lhs.nope=1",
        "mxfp4:fprop=nope",
        "mxfp4:wgrad.lhs.block=48",
    ):
        with pytest.raises(ValueError, match=r"recipe|block=48"):
            recipes.parse(text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_describe_explains_every_word_and_says_what_is_biased(name, capsys):
    assert cli.main(["describe", name]) == 0
    out = capsys.readouterr().out
    entry = recipes.ENTRIES[name]
    for text in (entry.summary, entry.source, entry.deviations, entry.recipe.digest()):
        assert text in out
    specs = [s for g in recipe.GEMMS for s in (getattr(entry.recipe, g).lhs, getattr(entry.recipe, g).rhs)]
    legend = out.split("\n\n")[-1].splitlines()
    words = {line.split()[0] for line in legend}
    used = {w for s in specs for w in (s.format, s.scale_rule, s.rounding)} - {"none"}
    assert used <= words | {"fprop"}
    if any(s.rounding == "sr" for s in specs):
        (line,) = (line for line in legend if line.startswith("sr "))
        for rule in {s.scale_rule for s in specs if s.rounding == "sr"}:
            assert (f"unbiased with {rule}" in line) == (rule in formats.NEVER_CLIPS)


def test_list_and_diff_in_both_forms(capsys):
    assert cli.main(["list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == recipes.names()
    assert cli.main(["diff", "mxfp4", "mxfp4_sr_grad", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"leaf": "dgrad.lhs.rounding", "first": "rne", "second": "sr"},
        {"leaf": "wgrad.rhs.rounding", "first": "rne", "second": "sr"},
    ]
    assert cli.main(["diff", "mxfp4", "mxfp4"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert cli.main(["describe", "mxfp4_h61"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown recipe 'mxfp4_h61'")
    assert cli.main(["describe", "mxfp4_h16", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 6
