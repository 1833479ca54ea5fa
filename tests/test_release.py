"""What a release needs: one version everywhere, a section in the changelog, and no secrets."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import muonjax

ROOT = pathlib.Path(__file__).parents[1]


def python(code, folder, without):
    """Run `code` in a folder, without the environment's variables that begin so."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(without)
    }
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, check=False
    )


def release(code):
    """Run `code` with the functions of `.ci/release` in `r`."""
    code = f"import runpy; r = runpy.run_path('.ci/release'); {code}"
    return python(code, ROOT, without="GITHUB")


def test_version_is_the_same_everywhere():
    assert re.fullmatch(r"\d+\.\d+\.\d+", muonjax.__version__)
    done = release(f"print(r['check_version']('v{muonjax.__version__}'))")
    assert done.stdout.strip() == muonjax.__version__, done.stderr


def test_an_editable_install_has_the_two_packages_alone(tmp_path):
    code = "import muonjax, pallas_kernels, importlib.util as u; print([n for n in %r if u.find_spec(n)])"
    others = ["tests", "benchmarks", "plots", "meshes", "checkpoints"]
    done = python(code % others, tmp_path, without="PYTHONPATH")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("tag", ["v9.9.9", muonjax.__version__])
def test_another_tag_is_refused(tag):
    assert "does not name the version" in release(f"r['check_version']('{tag}')").stderr


def test_links_of_the_readme_work_elsewhere(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        "![p](docs/a.png) [b](docs/b.md#c) [d](https://x.org) [e](#f) https://github.com/OWNER/muonjax"
    )
    done = release(f"r['write_links'](__import__('pathlib').Path('{readme}'), '1.2.3')")
    assert done.returncode == 0, done.stderr
    site = "https://github.com/OWNER/muonjax"
    assert readme.read_text() == (
        f"![p]({site}/raw/v1.2.3/docs/a.png) [b]({site}/blob/v1.2.3/docs/b.md#c) [d](https://x.org) [e](#f) {site}"
    )


def test_one_switch_installs_from_pypi_and_shows_the_badges(tmp_path):
    """It works a second time too, because each later release builds a README that has been switched."""
    pages = "README.md", "docs/quickstart.md"
    (tmp_path / "docs").mkdir()
    for page in pages:
        (tmp_path / page).write_text((ROOT / page).read_text())
    for _ in range(2):
        code = f"r['publish'](__import__('pathlib').Path('{tmp_path}'), 'someone')"
        done = release(code)
        assert done.returncode == 0, done.stderr
        for page in pages:
            before, rest = (ROOT / page).read_text().split("<!-- install -->")
            switched, after = (tmp_path / page).read_text().split("<!-- install -->")
            assert after.split("<!-- end -->", 1)[1] == rest.split("<!-- end -->", 1)[1]
            assert "pip install muonjax\n" in after
            assert "not on PyPI" not in after
            assert switched == before or page == "README.md"
        badge = "\n[![PyPI](https://img.shields.io/pypi/v/muonjax.svg)]"
        readme = (tmp_path / "README.md").read_text()
        assert badge in readme
        assert "github.com/someone/muonjax/actions" in readme
        assert "OWNER" not in readme
    (tmp_path / "README.md").write_text("# No block\n")
    assert "it needs one" in release(code).stderr


def test_the_workflow_publishes_on_a_tag_without_secrets():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert 'tags: ["v*"]' in text
    assert "secrets." not in text
    assert text.count("id-token: write") == 1
    assert text.index("publish:") < text.index("id-token: write")
