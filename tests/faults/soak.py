"""Kill one training run at random moments, restart it each time, and compare it with a run that was never interrupted.

    python tests/faults/soak.py [--kills=50] [--processes=2] [--seed=0]

The kills fall into every phase in turn: start-up, compiling (with an empty cache), restoring, between steps, during a save,
during an evaluation; every tenth is a SIGTERM, which must leave a checkpoint and exit code 143. With --processes=2 one of two
is killed, and the other must end by itself. What must be equal to the bit: all rows of metrics.jsonl, the JSON line on
stdout, the checksum of the last checkpoint's state.

Examples are not read off the data iterator, which could err with its checkpoints: a hook around the compiled train step, that
only this script installs, logs the token windows it is really given with the number of the step, which the state itself
counts. A step that was lost with its process is done again, so the last time that it was done counts; every other time must
have had the same windows. Over all complete epochs each window of the corpus must then have been seen once: fewer is lost,
more is repeated. Prints a table; exits with 1 on any difference.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
STEPS_PER_KILL = 12
PHASES = ("start-up", "restore", "compile", "step", "save", "evaluation")
SECONDS = {
    "start-up": 4.0,
    "restore": 1.0,
    "compile": 6.0,
    "step": 0.02,
    "save": 0.15,
    "evaluation": 0.05,
}  # a kill is that late
END_S = 120  # a process that should end by itself and has not is a failure
SEQ_LEN, BATCH_SIZE = 32, 8


def child(directory: pathlib.Path, process: int, arguments: list[str]) -> None:
    """Run train.main with the hooks: what phase this process is in, and what its train step is given."""
    import numpy as np

    from train import checkpoint, cli, loop, main, step

    marker = os.open(directory / f"phase.{process}", os.O_WRONLY)
    log = open(directory / f"examples.{process}.jsonl", "a", buffering=1)  # noqa: SIM115  (open until it is killed)

    def enter(phase):
        os.pwrite(marker, phase.ljust(12).encode(), 0)

    def around(owner, name, before, after=lambda *_: None):
        real = getattr(owner, name)

        def hooked(*arguments, **options):
            before(*arguments)
            result = real(*arguments, **options)
            after(*arguments)
            return result

        setattr(owner, name, hooked)

    make = step.make_train_step

    def make_logged(*arguments, **options):
        real = make(*arguments, **options)

        def logged(state, tokens):
            for shard in {shard.index: shard for shard in tokens.addressable_shards}.values():
                windows = np.asarray(shard.data).astype(np.uint8)
                first = shard.index[0].start or 0
                log.write(json.dumps([int(state.step) + 1, first, [row.tobytes().hex() for row in windows]]) + "\n")
            result = real(state, tokens)
            if not saving:
                enter("step")
            return result

        return logged

    saving = []
    step.make_train_step = make_logged
    around(loop.Run, "__init__", lambda *_: enter("restore"), lambda *_: enter("compile"))
    around(loop.Run, "evaluate", lambda *_: enter("evaluation"), lambda *_: enter("step"))
    around(checkpoint.Checkpoints, "save", lambda *_: (saving.append(1), enter("save")))
    around(checkpoint.Checkpoints, "check", lambda c: None if c._manager.is_saving_in_progress() else saving.clear())
    sys.argv = ["train.main", *arguments]
    cli.run(main.main)


class Start:
    """The processes of one start of the run."""

    def __init__(self, directory, arguments, count, *, cache):
        import helpers

        self.directory, environment = directory, helpers.environment(devices=2 // count)
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": str(cache)}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.processes = []
        for i in range(count):
            (directory / f"phase.{i}").write_text("start-up    ")
            joined = [f"--coordinator={address}", f"--processes={count}", f"--process={i}", "--join_timeout=40"]
            its_own = [*arguments, *joined] if count > 1 else arguments
            with open(directory / f"stdout.{i}", "w") as out, open(directory / f"stderr.{i}", "w") as err:
                command = [sys.executable, __file__, "child", str(directory), str(i), *its_own]
                self.processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err))

    def phase(self):
        return (self.directory / "phase.0").read_text().strip()

    def running(self):
        return all(process.poll() is None for process in self.processes)

    def wait(self, limit=END_S):
        """Return the exit codes; None for a process that had to be killed after so many seconds."""
        codes, deadline = [], time.monotonic() + limit
        for process in self.processes:
            try:
                codes.append(process.wait(max(deadline - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        return codes

    def complaints(self):
        """Return the lines of stderr that no restart should print."""
        texts = [(self.directory / f"stderr.{i}").read_text() for i in range(len(self.processes))]
        return [line for text in texts for line in text.splitlines() if re.search(r"Traceback|going back|no rows of", line)]


def steps_done(workdir):
    path = workdir / "metrics.jsonl"
    return path.read_text().count('"train_loss"') if path.exists() else 0


def kill(start, phase, draw, *, target, number):
    """Signal one process a moment after it entered the phase, past step `target`; return (phase it was in, which process)."""
    workdir, victim = start.directory / "run", draw.randrange(len(start.processes))
    early = PHASES.index(phase) <= PHASES.index("compile")
    while start.running():
        if start.phase() == phase and (early or steps_done(workdir) > target):
            break
        time.sleep(0.001)
    time.sleep(draw.uniform(0, SECONDS[phase]))
    if not start.running():
        return None, victim
    found = start.phase()
    start.processes[victim].send_signal(number)
    return found, victim


def examples(directory, count, *, steps):
    """Return ({step: windows of the last time it was done}, how often a step was done with other windows than before)."""
    parts, changed = collections.defaultdict(dict), 0
    for process in range(count):
        for line in (directory / f"examples.{process}.jsonl").read_text().splitlines():
            try:
                at, first, windows = json.loads(line)
            except ValueError:
                continue  # the line that was being written
            changed += parts[at].get(first, windows) != windows
            parts[at][first] = windows
    return {at: [w for first in sorted(parts[at]) for w in parts[at][first]] for at in range(1, steps + 1)}, changed


def lost_and_repeated(seen, dataset):
    """Return (lost, repeated, complete epochs) over the steps in order."""
    tokens, total = dataset.train[0].astype("uint8"), (len(dataset.train[0]) - 1) // SEQ_LEN
    corpus = {tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].tobytes().hex() for i in range(total)}
    assert len(corpus) == total, "two windows of the corpus are equal"
    order = [window for at in sorted(seen) for window in seen[at]]
    lost = repeated = 0
    for first in range(0, len(order), total):
        epoch = collections.Counter(order[first : first + total])
        assert set(epoch) <= corpus
        repeated += sum(n - 1 for n in epoch.values())
        lost += total - len(epoch) if first + total <= len(order) else 0
    return lost, repeated, len(order) // total


def state_checksum(workdir, step):
    return json.loads((workdir / "checkpoints" / str(step) / "run" / "metadata").read_text())["state_checksum"]


def soak(directory, *, kills, count, seed):
    """Return the differences that were found, as lines."""
    import helpers

    from train import data

    steps, draw = kills * STEPS_PER_KILL, random.Random(seed)
    corpus = helpers.write_corpus(directory)
    changes = {"quant__recipe": "mxfp4_sr", "train__steps": steps, "train__checkpoint_every": 5, "train__eval_every": 8}
    changes |= {"train__keep_checkpoints": 3, "mesh__fsdp": 2}
    arguments = {name: helpers.argv(corpus, directory / name / "run", **changes) for name in ("whole", "killed")}
    for name in arguments:
        (directory / name).mkdir()
    wrong, clock = [], time.monotonic()
    whole = Start(directory / "whole", arguments["whole"], count, cache=directory / "cache")
    if whole.wait(END_S + steps) != [0] * count:
        return [f"the uninterrupted run failed: {(directory / 'whole' / 'stderr.0').read_text()[-2000:]}"]
    print(f"uninterrupted: {steps} steps in {time.monotonic() - clock:.0f} s", flush=True)

    here, clock, table = directory / "killed", time.monotonic(), collections.Counter()
    phases = [PHASES[i % len(PHASES)] for i in range(kills)]
    draw.shuffle(phases)
    for i, phase in enumerate(phases):
        number = signal.SIGTERM if i % 10 == 9 else signal.SIGKILL
        phase = "step" if number == signal.SIGTERM else phase
        target = steps * i // kills + draw.randrange(STEPS_PER_KILL // 2)
        with tempfile.TemporaryDirectory() as empty:
            cache = empty if phase == "compile" else directory / "cache"
            start = Start(here, arguments["killed"], count, cache=cache)
            found, victim = kill(start, phase, draw, target=target, number=number)
            codes = start.wait()
        if found is None:
            wrong.append(f"kill {i + 1}: the run ended before it, with {codes}: {(here / 'stderr.0').read_text()[-500:]}")
            break
        expected = [143] * count if number == signal.SIGTERM else [-9 if p == victim else None for p in range(count)]
        for process, (code, wanted) in enumerate(zip(codes, expected, strict=True)):
            ended = code in (4, -6) if wanted is None else code == wanted  # 4, or the abort of JAX's own service
            wrong += [] if ended else [f"kill {i + 1} ({found}): process {process} of {count} ended with {code}"]
        wrong += [f"kill {i + 1}: {line}" for line in start.complaints()]
        table[found, number] += 1
        print(f"{i + 1:3d} {number.name} {found:10s} at step {steps_done(here / 'run'):4d}  exit codes {codes}", flush=True)
        for process, code in enumerate(codes if count > 1 else ()):
            if code != -9:
                said = (here / f"stderr.{process}").read_text().strip().splitlines()
                print(f"      process {process}, {code}: {said[-1] if said else ''}", flush=True)
    end = Start(here, arguments["killed"], count, cache=directory / "cache")
    codes = end.wait()
    wrong += [] if codes == [0] * count else [f"the last start ended with {codes}"]
    wrong += end.complaints()

    rows, expected = helpers.rows(here / "run"), helpers.rows(directory / "whole" / "run")
    differ = sum(a != b for a, b in zip(rows, expected, strict=False)) + abs(len(rows) - len(expected))
    trained = [row["step"] for row in rows if "train_loss" in row]
    seen, changed = examples(here, count, steps=steps)
    dataset = data.load(helpers.settings(corpus, **changes).data)
    lost, repeated, epochs = lost_and_repeated(seen, dataset)
    order = sum(seen[at] != batch for at, batch in examples(directory / "whole", count, steps=steps)[0].items())
    last = {name: (directory / name / "stdout.0").read_text().splitlines()[-1:] for name in arguments}
    sums = {name: state_checksum(directory / name / "run", steps) for name in arguments}
    print(f"\n{kills} kills in {time.monotonic() - clock:.0f} s, processes: {count}, {steps} steps, {epochs} epochs, {seed=}")
    print(f"{'phase':12s}{'kill -9':>9s}{'SIGTERM':>9s}")
    for phase in PHASES:
        print(f"{phase:12s}{table[phase, signal.SIGKILL]:9d}{table[phase, signal.SIGTERM]:9d}")
    figures = {
        f"rows of {len(expected)} that differ": differ,
        "steps missing or twice": abs(len(trained) - len(set(trained))) + len(set(range(1, steps + 1)) - set(trained)),
        f"examples of {BATCH_SIZE * steps} lost": lost,
        f"examples of {BATCH_SIZE * steps} repeated": repeated,
        "steps given other examples than in the whole run": order,
        "steps done again with other examples": changed,
        "last line of stdout differs": int(last["whole"] != last["killed"]),
        "checksum of the last state differs": int(sums["whole"] != sums["killed"]),
    }
    for name, figure in figures.items():
        print(f"{name:50s}{figure:6d}")
    return wrong + [f"{name}: {figure}" for name, figure in figures.items() if figure]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        wrong = soak(pathlib.Path(directory), kills=options.kills, count=options.processes, seed=options.seed)
    for line in wrong:
        print(f"WRONG: {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:  # its other arguments are those of train.main
        child(pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    main()
