"""Kill and resume training runs, damage checkpoints, and compare the results bit for bit.

python -m benchmarks.reliability.killed_runs --kills 50 --damages 100

`examples/train_transformer.py`, tiny and with a checkpoint every other step, is sent SIGKILL at random moments after
its first step and resumed until it is finished: its parameters must have the digest, and its metrics the losses, of an
uninterrupted run. Then files of a complete checkpoint are truncated, emptied, deleted or have a bit flipped: the run
must refuse the checkpoint, or restore the same bits if the file does not matter.
"""

import csv
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

SIZE = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "2", "--sample", "0"]
SIZE += ["--quiet", "--checkpoint-every", "2", "--eval-every", "1000"]
DAMAGES = ("cut in half", "emptied", "deleted", "a bit flipped")


def launch(out: pathlib.Path, steps: int) -> subprocess.Popen:
    """Start the run in `out`, or resume it if there is a complete checkpoint."""
    started = any(path.name.isdigit() for path in (out / "checkpoints").glob("*"))
    command = [sys.executable, str(EXAMPLES / "train_transformer.py"), *SIZE, "--steps", str(steps)]
    command += ["--resume" if started else "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses(out: pathlib.Path) -> list[tuple[str, str]]:
    """Step and loss of every complete row of metrics.csv."""
    path = out / "metrics.csv"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [(row[0], row[1]) for row in csv.reader(line for line in lines[1:] if line.endswith("\n"))]


def finish(process: subprocess.Popen) -> str:
    """The digest of a run's final parameters."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(output)
    return re.search(r"parameters (\w+)", output)[1]  # pyright: ignore[reportOptionalSubscript]


def strike(process: subprocess.Popen, out: pathlib.Path, delay: float) -> str | None:
    """Kill the run `delay` seconds after its first new step; returns what it was doing, or None if it had finished."""
    before = losses(out)
    while process.poll() is None and losses(out) in (before, []):
        time.sleep(0.002)
    time.sleep(delay)
    if process.poll() is not None:
        return None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    writing = any("tmp" in path.name for path in (out / "checkpoints").glob("*"))
    return "writing a checkpoint" if writing else "taking steps"


def kill_and_resume(
    folder: pathlib.Path, *, kills: int, steps: int, longest: float = 0.5, seed: int = 0
) -> dict[str, Any]:
    """Kill runs `kills` times in all; each run is resumed until it is finished."""
    rng = random.Random(seed)
    expected = finish(launch(folder / "whole", steps))
    struck: list[str] = []
    same = []
    while len(struck) < kills:
        out = folder / f"killed-{len(same)}"
        process = launch(out, steps)
        while len(struck) < kills and (doing := strike(process, out, rng.uniform(0, longest))):
            struck.append(doing)
            process = launch(out, steps)
        same.append(finish(process) == expected and losses(out) == losses(folder / "whole"))
    return {
        "kills": len(struck),
        "while_writing": struck.count("writing a checkpoint"),
        "while_stepping": struck.count("taking steps"),
        "runs": len(same),
        "runs_with_the_same_bits": sum(same),
        "steps": steps,
    }


def damage(path: pathlib.Path, kind: str, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind == "deleted":
        path.unlink()
        return
    if kind == "a bit flipped" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes({"cut in half": data[: len(data) // 2], "emptied": b""}.get(kind, bytes(data)))


def damage_and_resume(out: pathlib.Path, *, damages: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """`damages` copies of the run in `out`, each with one file of its newest checkpoint damaged.

    The first damage of each kind is to the largest file, which contains parameters, the others to any file: Orbax gives
    its files random names, and about half of them are not needed to restore.
    """
    import checkpoints
    import train_transformer as example
    from text_data import Text

    args = example.parse([*SIZE, "--steps", str(steps), "--resume", str(out)])
    trainer = example.Trainer(args)
    like = {"params": trainer.params, "opt_state": trainer.opt_state}
    settings = example.identify(args, Text(args.data))
    _, state = checkpoints.restore(out / "checkpoints", settings, like)
    whole = checkpoints.digest(state)
    rng = random.Random(seed)
    found = {kind: {"refused": 0, "same bits": 0, "other bits": 0, "crashed": 0} for kind in DAMAGES}
    for index in range(damages):
        kind = DAMAGES[index % len(DAMAGES)]
        with tempfile.TemporaryDirectory() as copy:
            folder = pathlib.Path(copy) / "checkpoints"
            shutil.copytree(out / "checkpoints", folder)
            newest = folder / str(checkpoints.steps(folder)[-1])
            files = sorted(
                (path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
            )
            damage(files[-1] if index < len(DAMAGES) else rng.choice(files), kind, rng)
            try:
                _, state = checkpoints.restore(folder, settings, like)
                outcome = "same bits" if checkpoints.digest(state) == whole else "other bits"
            except SystemExit:
                outcome = "refused"
            except Exception:
                outcome = "crashed"
        found[kind][outcome] += 1
    return found


def main() -> None:
    from benchmarks.common import measure

    args = measure.options(__doc__, kills=50, damages=100, steps=100)
    with tempfile.TemporaryDirectory() as folder:
        runs = pathlib.Path(folder)
        killed = kill_and_resume(runs, kills=args.kills, steps=args.steps)
        damaged = damage_and_resume(runs / "whole", damages=args.damages, steps=args.steps)
    rows = [{"damage": kind, **outcomes} for kind, outcomes in damaged.items()]
    measure.write("killed_runs", {"killed": killed, "damaged": rows}, [killed], rows)


if __name__ == "__main__":
    main()
