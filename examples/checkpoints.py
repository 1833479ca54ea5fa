"""Save and restore checkpoints bit for bit; refuse what is damaged or belongs to another run."""

import hashlib
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from meshes import whole


def digest(tree: Any) -> str:
    """A hash of the bits of all leaves."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(whole(tree)):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()[:16]


class Checkpoints:
    """The last two states of a run, written to a temporary folder first and then renamed."""

    def __init__(self, folder: pathlib.Path, settings: dict[str, Any]):
        self._settings = settings
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: Any) -> None:
        """Write the state after `step` steps."""
        run = {"settings": self._settings, "digest": digest(state)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        self._manager.save(step, args=items, force=True)
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.close()


def steps(folder: pathlib.Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    return sorted(
        int(path.name) for path in folder.glob("*") if path.is_dir() and path.name.isdigit()
    )


def read_run(folder: pathlib.Path) -> dict[str, Any]:
    """The settings of the run that wrote the newest checkpoint in `folder`, and that checkpoint's digest."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        return manager.restore(
            steps(folder)[-1], args=ocp.args.Composite(run=ocp.args.JsonRestore())
        )["run"]


def restore(folder: pathlib.Path, settings: dict[str, Any], like: Any) -> tuple[int, Any]:
    """The newest state in `folder`, and its step.

    Raises SystemExit, and writes nothing, if there is none, if it is damaged, or if another run made it.
    """
    if not steps(folder):
        raise SystemExit(
            f"--resume: {folder} holds no complete checkpoint; start a run there with --out."
        )
    step = steps(folder)[-1]
    refuse = f"--resume: the checkpoint {folder / str(step)} "
    try:
        run = read_run(folder)
        found = run["settings"]
    except Exception as error:
        raise SystemExit(
            refuse + f"was not written by this program, or is damaged ({type(error).__name__})."
        ) from None
    different = [
        f"{k}: {found.get(k)!r} there, {v!r} here" for k, v in settings.items() if found.get(k) != v
    ]
    if different:
        raise SystemExit(
            refuse
            + "belongs to another run ("
            + "; ".join(different)
            + "): give it the same settings."
        )
    try:
        options = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            state = manager.restore(step, args=items)["state"]
        whole = digest(state) == run["digest"]
    except Exception as error:
        raise SystemExit(refuse + f"is damaged ({type(error).__name__}).") from None
    if not whole:
        raise SystemExit(refuse + "is damaged: its contents do not match their digest.")
    return step, state
