"""The wheel's URLs and links are those of where it is built, and nobody's password is in them."""

import email
import os
import re
import subprocess
import sys
from email.message import Message
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from compress.version import VERSION

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("compress", "calibration", "exporters", "kernels", "recipes", "docs")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
ADDRESS = "https://git.example.org/team/compress-model"
TAG = f"v{VERSION}"
PREPARE = "import setuptools.build_meta as b, sys; b.prepare_metadata_for_build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """setup.py, which sets nothing up when it is imported."""
    spec = spec_from_file_location("compress_setup", REPO / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What metadata is made of, and no clone."""
    made = tmp_path / "tree"
    made.mkdir()
    for name in FOLDERS:
        (made / name).symlink_to(REPO / name)
    for name in FILES:
        (made / name).write_bytes((REPO / name).read_bytes())
    return made


def git(tree: Path, *arguments: str) -> str:
    who = ("-c", "user.name=T", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(tree), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def cloned(tree: Path, origin: str) -> str:
    """The commit of a clone of `origin`."""
    git(tree, "init", "-q")
    git(tree, "remote", "add", "origin", origin)
    git(tree, "commit", "-q", "--allow-empty", "-m", "x")
    return git(tree, "rev-parse", "HEAD")


def metadata(tree: Path, variable: str | None) -> Message:
    """As setuptools makes it, in a process of its own."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COMPRESS_MODEL_URL", "PYTHONPATH")}
    environment = kept if variable is None else kept | {"COMPRESS_MODEL_URL": variable}
    out = tree.parent / f"metadata-{len(list(tree.parent.iterdir()))}"
    out.mkdir()
    command = [sys.executable, "-c", PREPARE, str(out)]
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    (found,) = out.glob("*.dist-info/METADATA")
    return email.message_from_string(found.read_text())


def urls(found: Message) -> dict[str, str]:
    return dict(line.split(", ", 1) for line in found.get_all("Project-URL", []))


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("https://github.com/o/r.git", "https://github.com/o/r"),
        ("https://github.com/o/r/", "https://github.com/o/r"),
        ("http://git.example.org:8080/o/r", "http://git.example.org:8080/o/r"),
        ("https://user:pass@github.com/o/r.git", "https://github.com/o/r"),
        ("https://ghp_token@github.com/o/r", "https://github.com/o/r"),
        ("https://github.com/o/r?token=secret#x", "https://github.com/o/r"),
        ("git@github.com:o/r.git", "https://github.com/o/r"),
        ("ssh://git@github.com:22/o/r.git", "https://github.com/o/r"),
        ("https://8.8.8.8/o/r", "https://8.8.8.8/o/r"),
        ("https://[2606:4700::1]/o/r", "https://[2606:4700::1]/o/r"),
        ("https://[2606:4700::1]:8443/o/r", "https://[2606:4700::1]:8443/o/r"),
        ("ssh://git@[2606:4700::1]:22/o/r.git", "https://[2606:4700::1]/o/r"),
        ("https://github.com./o/r", "https://github.com/o/r"),
        ("https://home.example.org/o/r", "https://home.example.org/o/r"),
        ("", None),
        ("/srv/git/r.git", None),
        ("../r", None),
        ("file:///srv/git/r.git", None),
        ("git@work:o/r.git", None),
        ("git@git.example.org:/srv/r.git", None),
        ("git@git.example.org:~/r.git", None),
        ("http://localhost:3000/o/r", None),
        ("http://127.0.0.1/o/r", None),
        ("https://10.0.0.7/o/r", None),
        ("https://[::1]/o/r", None),
        ("https://[fd00::7]/o/r", None),
        ("https://git.local/o/r", None),
        ("https://git.local./o/r", None),
        ("http://localhost./o/r", None),
        ("https://127.0.0.1./o/r", None),
        ("git@gitea.lan:o/r.git", None),
        ("https://git.home.arpa/o/r", None),
        ("ssh://git@git.home:2222/o/r.git", None),
        ("https://git.corp/o/r", None),
        ("https://git.intranet/o/r", None),
        ("https://github.com", None),
        ("https://github.com/o/r\nX: y", None),
        ("https://[::/o/r", None),
        ("https://github.com:port/o/r", None),
        ("ftp://git.example.org/o/r", None),
    ],
)
def test_address_of_a_remote(script: ModuleType, given: str, address: str | None) -> None:
    assert script.address_of(given) == address


LINKS = {
    "[a](docs/a.md)": "[a](<docs/a.md>)",
    "[a](./docs/../docs/a.md#part)": "[a](<docs/a.md>#part)",
    "[a](/docs/a.md)": "[a](<docs/a.md>)",
    '[a](docs/a.md "title")': '[a](<docs/a.md> "title")',
    "[`code`](docs/a.md)": "[`code`](<docs/a.md>)",
    "![p](docs/p.png)": "![p](<docs/p.png>)",
    "[![p](p.svg)](docs/a.md)": "[![p](<p.svg>)](<docs/a.md>)",
    "[a]: docs/a.md": "[a]: <docs/a.md>",
    '<img width="3" src="docs/p.png">': '<img width="3" src="<docs/p.png>">',
    "[a](x.md) `[b](y.md)` [c](z.md)": "[a](<x.md>) `[b](y.md)` [c](<z.md>)",
}
KEPT = (
    "[x](#x)",
    "[a](https://example.org/docs/a.md)",
    "[m](mailto:a@example.org)",
    "[a](//example.org/a)",
    "[up](../elsewhere/a.md)",
    "a `[b](c.md)` d",
    "``[`b`](c.md)``",
    "```sh\n[b](c.md)\n```\n",
    "- a\n  ~~~\n  [b](c.md)\n  ~~~\n",
    "```\n[b](c.md)",
)


@pytest.mark.parametrize(("text", "wanted"), LINKS.items())
def test_links_become_absolute(script: ModuleType, text: str, wanted: str) -> None:
    assert script.absolute_links(text, lambda path: f"<{path}>") == wanted


@pytest.mark.parametrize("text", KEPT)
def test_what_stays_as_it_is(script: ModuleType, text: str) -> None:
    assert script.absolute_links(text, lambda path: f"<{path}>") == text
    around = f"[a](b.md)\n\n{text}\n\nno end: ` \n\n[d](e.md)\n"
    done = script.absolute_links(around, lambda path: f"<{path}>")
    assert text in done
    assert done.startswith("[a](<b.md>)")
    # A block without an end goes on to the end of the text.
    assert ("[d](<e.md>)" in done) == (text != KEPT[-1])


@pytest.mark.parametrize(
    ("host", "file", "folder", "picture", "issues"),
    [
        ("github.com", "blob/v1", "tree/v1", "raw/v1", "issues"),
        ("gitlab.example.org", "-/blob/v1", "-/tree/v1", "-/raw/v1", "-/issues"),
        ("codeberg.org", "src/tag/v1", "src/tag/v1", "raw/tag/v1", "issues"),
        ("bitbucket.org", "src/v1", "src/v1", "raw/v1", "issues"),
    ],
)
def test_paths_are_those_of_the_host(
    script: ModuleType, host: str, file: str, folder: str, picture: str, issues: str
) -> None:
    repository = script.Repository(f"https://{host}/o/r", "v1")
    assert repository.link("README.md") == f"https://{host}/o/r/{file}/README.md"
    assert repository.link("docs") == f"https://{host}/o/r/{folder}/docs"
    assert repository.link("docs/a.PNG") == f"https://{host}/o/r/{picture}/docs/a.PNG"
    assert repository.urls()["Issues"] == f"https://{host}/o/r/{issues}"


def test_readme_has_no_link_that_stays_relative(script: ModuleType) -> None:
    _, text = script.described(REPO, ADDRESS)
    assert f"({ADDRESS}/" in text
    targets = re.findall(r"\]\(([^)\s]+)", script.CODE.sub("", text))
    assert [x for x in targets if not x.startswith(("https://", "#"))] == []
    for path in re.findall(rf"\({ADDRESS}/(?:blob|tree|raw)/[^/]+/([^)#]+)", text):
        assert (REPO / path).exists(), path


def test_metadata_has_what_the_environment_names(tree: Path) -> None:
    found = metadata(tree, "https://user:secret@git.example.org/team/compress-model.git")
    assert urls(found) == {
        "Homepage": ADDRESS,
        "Documentation": f"{ADDRESS}/tree/{TAG}/docs",
        "Source": ADDRESS,
        "Issues": f"{ADDRESS}/issues",
        "Changelog": f"{ADDRESS}/blob/{TAG}/CHANGELOG.md",
    }
    assert "secret" not in found.as_string()
    assert found["Description-Content-Type"] == "text/markdown"
    assert f"]({ADDRESS}/blob/{TAG}/docs/recipes.md)" in found.get_payload()


def test_an_sdist_hands_its_address_on(tree: Path) -> None:
    cloned(tree, f"{ADDRESS}.git")
    first = metadata(tree, None)
    assert urls(first)["Source"] == ADDRESS
    # As in an sdist: its metadata, and no clone.
    (tree / ".git").rename(tree.parent / "git")
    (tree / "PKG-INFO").write_text(first.as_string())
    second = metadata(tree, None)
    assert (urls(second), second.get_payload()) == (urls(first), first.get_payload())
    other = "https://other.example.org/a/b"
    assert urls(metadata(tree, other))["Source"] == other


def test_without_an_address_there_are_no_urls(tree: Path) -> None:
    cloned(tree, "/srv/git/compress-model.git")
    found = metadata(tree, None)
    assert urls(found) == {}
    assert found.get_payload().strip() == (REPO / "README.md").read_text().strip()


def test_links_are_to_the_tag_that_is_on_the_commit(script: ModuleType, tree: Path) -> None:
    commit = cloned(tree, "git@github.com:o/r.git")
    assert script.repository(tree, None) == script.Repository("https://github.com/o/r", commit)
    git(tree, "tag", TAG)
    assert script.repository(tree, None).ref == TAG
    git(tree, "commit", "-q", "--allow-empty", "-m", "later")
    assert script.repository(tree, None).ref == git(tree, "rev-parse", "HEAD") != commit


def test_a_clone_around_an_sdist_is_not_asked(script: ModuleType, tree: Path) -> None:
    cloned(tree.parent, "https://github.com/somebody/else.git")
    assert script.repository(tree, None) is None


def test_an_empty_variable_is_no_address(script: ModuleType, tree: Path) -> None:
    cloned(tree, f"{ADDRESS}.git")
    assert script.repository(tree, "") is None


def test_a_variable_that_is_no_address_ends_the_build(script: ModuleType, tree: Path) -> None:
    with pytest.raises(SystemExit, match=r"^COMPRESS_MODEL_URL is no public") as refused:
        script.repository(tree, "ftp://user:secret@git.example.org/o/r")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("command", ["sdist", "bdist_wheel"])
def test_the_build_says_that_there_is_no_address(tree: Path, command: str) -> None:
    environment = os.environ | {"COMPRESS_MODEL_URL": ""}
    done = subprocess.run(
        [sys.executable, "setup.py", command, "--help"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("no address:") == 1
