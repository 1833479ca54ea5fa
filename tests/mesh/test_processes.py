"""Several processes, one mesh: the example, killed and restarted onto another mesh, ends where one process does."""

import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

EXAMPLE = (
    pathlib.Path(__file__).parent.parent.parent / "examples" / "train_transformer.py"
)
# The learning rate is lower than the example's own: the gradients differ in their last digits, for each mesh sums in
# another order.
TINY = """
    --layers 1 --width 16 --heads 4 --context 16 --batch 4 --sample 0 --steps 12 --checkpoint-every 4 --eval-every 12
    --learning-rate 1e-3 --quiet --optimizer muonclip
"""


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *TINY.split(), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_two(*arguments):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [
        start(*arguments, "--coordinator", address, "--processes", 2, "--process", i)
        for i in range(2)
    ]


def finish(*processes):
    """Their outputs. Without a time limit of its own, for a busy machine is slow; pytest's stops what hangs."""
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs


def parameters(out):
    """Read the last checkpoint as NumPy arrays, whatever devices wrote it."""
    handler = ocp.PyTreeCheckpointer()
    folder = out.absolute() / "checkpoints" / "12" / "state"
    tree = handler.metadata(folder).item_metadata.tree
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return handler.restore(folder, restore_args=arguments)["params"]


@pytest.mark.nightly
@pytest.mark.timeout(
    1800
)  # only for what hangs: it takes one to two minutes on an idle machine
def test_two_processes_killed_and_restarted_onto_another_mesh_end_where_one_does(
    tmp_path,
):
    alone = tmp_path / "alone"
    two = tmp_path / "two"
    finish(start("--mesh", "fsdp=4,tensor=2", "--out", alone))

    processes = start_two("--mesh", "fsdp=4,tensor=2", "--out", two)
    while (
        all(p.poll() is None for p in processes)
        and not (two / "checkpoints" / "4").exists()
    ):
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    killed = [process.communicate()[0] for process in processes]
    assert not (two / "checkpoints" / "12").exists(), killed
    first, second = finish(*start_two("--mesh", "fsdp=2,tensor=4", "--resume", two))
    assert "Resuming" in first
    assert "held-out loss" in first
    assert "held-out loss" not in second  # one of them prints

    expected = parameters(alone)
    found = parameters(two)
    assert len(jax.tree.leaves(expected)) == 12
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Where a gradient is nearly zero, AdamW enlarges its last digits: a single entry may differ by more.
        assert np.linalg.norm(x - y) < 1e-6 * np.linalg.norm(y)


@pytest.mark.thorough
def test_a_mesh_that_does_not_fit_is_refused():
    for mesh, says in (
        ("data=8", "not of the form"),
        ("fsdp=3", "fsdp must divide --batch"),
    ):
        process = start("--mesh", mesh)
        output = process.communicate()[0]
        assert process.returncode == 2
        assert says in output
