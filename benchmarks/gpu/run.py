"""Everything that only a GPU can tell, in one command and at most ten minutes.

    python -m benchmarks.gpu.run [--budget 540] [--only tiles,tests] [--out benchmarks/results] [--dry-run]

Each section (benchmarks/gpu/sections.py) is a process of its own with a limit of its own. Every result is in the
report, `gpu_<device>.json`, as soon as there is one: a kernel that fails, or hangs, loses only what would have
come after it in its section. Correctness comes first; what the budget cuts off is last, and `--only` takes it up
again. `gpu_<device>.txtpb` describes the device to `benchmarks/gpu/aot_hopper.py`.

`--dry-run` runs the same code anywhere, with small matrices and "blocked" in the kernel's place.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks.gpu.contradictions import contradictions

# The most important first, each with its limit in seconds.
SECTIONS = {
    "device": 60,
    "check": 120,
    "public": 240,
    "step": 180,
    "constants": 40,
    "product": 100,
    "fusion": 50,
    "tiles": 120,
    "tests": 200,
}

HERE = pathlib.Path(__file__).parent


def run_section(name, seconds, options, keep):
    """Runs the section for at most so long; calls `keep` with what is known of it, after each result."""
    print(f"== {name} (at most {seconds:.0f} s)", flush=True)
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    start = time.monotonic()
    report = {"ended": "not yet", "results": []}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.sections", name, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        # The whole group: pytest has children.
        limit = threading.Timer(seconds, lambda: os.killpg(process.pid, signal.SIGKILL))
        limit.start()
        try:
            for line in process.stdout:
                row = json.loads(line)
                report["results"].append(row)
                print("  " + summary(row), flush=True)
                keep(report)
            status = process.wait()
        finally:
            limit.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        took = time.monotonic() - start
        report["ended"] = (
            f"stopped after {took:.0f} s" if status == -signal.SIGKILL else f"exit status {status}"
        )
        report["seconds"] = round(took, 1)
        if status:
            log.seek(0)
            report["log"] = log.read()[-4000:]
    print(f"  {report['ended']}, {took:.0f} s", flush=True)
    keep(report)


def summary(row):
    """One line of a result, for whoever watches."""
    names = ("what", "kind", "tree", "implementation", "shape", "dtype", "y", "c")
    head = " ".join(f"{key}={row[key]}" if key in "yc" else str(row[key]) for key in names if key in row)
    if "error" in row:
        return f"{head}: {row['error'][:160]}"
    if "times" in row:
        clock = "device" if any("device" in times for times in row["times"].values()) else "host"
        cells = [
            f"{name} {times[clock]['median_ms']:.3f} ms ({times[clock]['ratio']:.2f}{_beside_model(times)})"
            if clock in times
            else f"{name} failed"
            for name, times in row["times"].items()
        ]
        others = [f"{name} {own:.3f} ms" for name, own in row.get("public_ms", {}).items()]
        return f"{head}, {clock}: " + ", ".join(cells) + "; public: " * bool(others) + ", ".join(others)
    if "relative_error" in row:
        return f"{head}: {'ok' if row['ok'] else 'WRONG'}, error {row['relative_error']:.2e}"
    return f"{head} {json.dumps({k: v for k, v in row.items() if k not in names})[:200]}"


def _beside_model(times):
    known = times.get("ahead_of_time_ms", times.get("modelled_ms"))
    return ", modelled {:.3f} to {:.3f} ms".format(*known) if known else ""


def commit():
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--dry-run", "--quick", action="store_true", help="small matrices, no GPU needed")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")

    start = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    provenance = {"device": "unknown", "commit": commit(), "date": time.strftime("%Y-%m-%d")}
    report = {
        "question": "is the Hopper kernel right, and how fast",
        "provenance": provenance,
        "sections": {},
    }

    def path():
        name = provenance["device"].lower().replace(" ", "_")
        return arguments.out / f"gpu_{'dry_run' if arguments.dry_run else name}.json"

    def write():
        partial = path().with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.replace(path())

    def keep_device(section):
        report["sections"]["device"] = section
        for row in section["results"]:
            provenance.update({key: row[key] for key in ("device", "versions") if key in row})
            if target := row.pop("target_config", None):
                path().with_suffix(".txtpb").write_text(target)
        if section["ended"] != "not yet":
            if path().exists():  # sections that an earlier run of the same code has measured
                earlier = json.loads(path().read_text())
                if earlier["provenance"] == provenance:
                    report["sections"] = {**earlier["sections"], **report["sections"]}
            write()

    for section in dict.fromkeys(["device", *wanted]):
        left = arguments.budget - (time.monotonic() - start)
        if left < 10:
            report["sections"].setdefault(section, {"ended": "not started: out of budget", "results": []})
            write()
            continue

        def keep(rows, section=section):
            report["sections"][section] = rows
            write()

        options = ["--dry-run"] if arguments.dry_run else []
        run_section(
            section, min(left, SECTIONS[section]), options, keep_device if section == "device" else keep
        )
    report["contradictions"] = contradictions(report)
    write()
    print("\n".join(["== contradicted by the measurement:", *(report["contradictions"] or ["nothing"])]))
    print(f"{path()}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
