"""Train a model from a config file:  python -m train.main --config=configs/tiny_cpu.py[:RECIPE] [--workdir=DIR]

Any leaf of the config can be overridden (--config.optimizer.peak_lr=3e-3). The same command again resumes. The last line
of stdout is a JSON object with step, val_loss, perplexity, tokens and recipe; everything else goes to stderr.
"""

import logging
import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from train import cli
from train.errors import InputError

log = logging.getLogger(__name__)
CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, with an optional :argument.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; default runs/<config name>[_<argument>].")
PROFILE = flags.DEFINE_bool("profile", False, "Trace three warm steps to WORKDIR/profile (TensorBoard, Perfetto).")
CLUSTER = flags.DEFINE_string("cluster", None, "Many processes, found through slurm, ompi, mpi4py or k8s; see launch/.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "Many processes by hand: HOST:PORT of process 0.")
PROCESSES = flags.DEFINE_integer("processes", None, "With --coordinator: how many processes the run has.")
PROCESS = flags.DEFINE_integer("process", None, "With --coordinator: the number of this one, from 0.")
HEARTBEAT = flags.DEFINE_integer("heartbeat", 30, "Seconds of silence after which a process counts as lost.")
JOIN = flags.DEFINE_integer("join_timeout", 300, "Seconds in which all processes have to be there.")


def main() -> int:
    if CONFIG.value is None:
        raise InputError("--config=FILE[:ARGUMENT] is missing, for instance --config=configs/tiny_cpu.py")
    alone = CLUSTER.value is None and COORDINATOR.value is None
    for flag in ("heartbeat", "join_timeout"):
        if alone and flags.FLAGS[flag].present:
            raise InputError(f"--{flag} has no effect on a run of one process")
    from train import config, loop, processes, report  # after the flags were read: importing jax and orbax takes seconds

    processes.start(
        cluster=CLUSTER.value,
        coordinator=COORDINATOR.value,
        processes=PROCESSES.value,
        process=PROCESS.value,
        heartbeat_s=HEARTBEAT.value,
        join_s=JOIN.value,
    )
    with processes.together():
        settings = config.resolve(CONFIG.value)
    workdir = pathlib.Path(WORKDIR.value or cli.default_workdir(config_flags.get_config_filename(flags.FLAGS["config"])))
    stop = cli.StopRequest()
    dataset, mesh, census = loop.prepare(settings, workdir)
    run = loop.Run(settings, workdir, dataset, mesh)  # restores first: a damaged checkpoint is one line on stderr
    if processes.is_primary():
        report.print_start(settings, workdir, dataset, mesh, census)
    try:
        result = run.train(stop, profile=PROFILE.value)
    except loop.GuardError as error:
        if processes.is_primary():
            print(f"stopped by a guard: {error}", file=sys.stderr)
        run.close()
        return cli.GUARD
    run.close()  # not after other exceptions: it waits for a save, which may wait for a process that is lost
    if processes.is_primary():
        cli.print_result(
            {
                "step": result.step,
                "val_loss": result.val_loss,
                "perplexity": cli.perplexity(result.val_loss),
                "tokens": result.step * run.tokens_per_step,
                "recipe": settings.phase(max(result.step - 1, 0)).recipe_name,
            }
        )
    return 128 + result.stopped if result.stopped else cli.DONE


if __name__ == "__main__":
    cli.run(main)
