"""What of the wheel's metadata depends on where it is built: project URLs, and links of README.md.

The rest stands in pyproject.toml. No address is written down here: it is COMPRESS_MODEL_URL of the
environment, else that of the clone's remote `origin`. An sdist hands what it got on to the wheels
that are built of it. Without an address there are no URLs, and links stay as README.md has them.
"""

import email
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from setuptools import setup

ROOT = Path(__file__).resolve().parent
VARIABLE = "COMPRESS_MODEL_URL"
NONE = (
    f"no address: {VARIABLE} is not set, and the remote origin has no public http(s) address; "
    "the metadata has no URLs, and links of the description stay relative"
)
# What only the builder's own network resolves; git@work:owner/repo may be an alias of ssh's.
LOCAL = (
    ".corp",
    ".home",
    ".home.arpa",
    ".internal",
    ".intranet",
    ".lan",
    ".local",
    ".localhost",
)
PICTURES = {".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp"}
# Fenced blocks, and spans between as many backticks within a paragraph.
CODE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^[ \t]*(?P=fence)[`~]*[ \t]*$|\Z)"
    r"|(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)(?P=ticks)(?!`)",
    re.MULTILINE | re.DOTALL,
)
# [text](target), [name]: target, <a href="target">, <img src="target">
LINK = re.compile(
    r'(?P<before>\]\(|^ {0,3}\[[^\]]+\]:[ \t]+|\b(?:src|href)=")(?P<target>[^()\s"<>]+)',
    re.MULTILINE,
)
ELSEWHERE = re.compile(r"#|//|[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class SitePaths:
    """Paths below a repository's address. kind: "tag" or "commit"."""

    file: str = "blob/{ref}"
    folder: str = "tree/{ref}"
    picture: str = "raw/{ref}"
    issues: str = "issues"


GITHUB = SitePaths()
GITLAB = SitePaths("-/blob/{ref}", "-/tree/{ref}", "-/raw/{ref}", "-/issues")
GITEA = SitePaths("src/{kind}/{ref}", "src/{kind}/{ref}", "raw/{kind}/{ref}")
BITBUCKET = SitePaths("src/{ref}", "src/{ref}", "raw/{ref}")
# A part of the host's name -> its paths; of other hosts they are GitHub's.
SITES = {
    "bitbucket": BITBUCKET,
    "codeberg": GITEA,
    "forgejo": GITEA,
    "gitea": GITEA,
    "gitlab": GITLAB,
}


@dataclass(frozen=True, slots=True)
class Repository:
    """address: of its page. ref: the tag or commit that links are to."""

    address: str
    ref: str

    @property
    def site(self) -> SitePaths:
        host = urlsplit(self.address).hostname or ""
        return next((site for part, site in SITES.items() if part in host), GITHUB)

    def link(self, path: str) -> str:
        """Address of a file or folder of the repository, in its version."""
        form = self.site.file
        if Path(path).suffix.lower() in PICTURES:
            form = self.site.picture
        elif (ROOT / path).is_dir():
            form = self.site.folder
        kind = "tag" if self.ref.startswith("v") else "commit"
        return f"{self.address}/{form.format(ref=self.ref, kind=kind)}/{path}"

    def urls(self) -> dict[str, str]:
        """By the labels that indexes know."""
        return {
            "Homepage": self.address,
            "Documentation": self.link("docs"),
            "Source": self.address,
            "Issues": f"{self.address}/{self.site.issues}",
            "Changelog": self.link("CHANGELOG.md"),
        }


def address_of(given: str) -> str | None:
    """The page of a repository by what git calls it: without user, password, query and `.git`.
    None for a path, file:, and a host that only the builder's network knows."""
    given = re.sub(r"^git@([^:/]+):(?=[^/~])", r"https://\1/", given)
    try:
        parts = urlsplit(given)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError:
        return None
    path = parts.path.rstrip("/").removesuffix(".git").rstrip("/")
    if not path or re.search(r"\s", given) or not _is_public(host):
        return None
    host = f"[{host}]" if ":" in host else host
    if parts.scheme == "ssh":
        return f"https://{host}{path}"  # its port is ssh's
    if parts.scheme not in ("http", "https"):
        return None
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"


def _is_public(host: str) -> bool:
    try:
        return ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith(LOCAL)


def absolute_links(text: str, link: Callable[[str], str]) -> str:
    """Markdown whose links to files of the repository are `link` of their paths. Code, anchors of
    the page itself, what is absolute and what leads out of the repository stay as they are."""

    def changed(found: re.Match[str]) -> str:
        path, mark, anchor = found["target"].partition("#")
        path = posixpath.normpath(path.lstrip("/"))
        if ELSEWHERE.match(found["target"]) or path.startswith(".."):
            return found[0]
        return f"{found['before']}{link(path)}{mark}{anchor}"

    done, pieces = 0, []
    for code in CODE.finditer(text):
        pieces += [LINK.sub(changed, text[done : code.start()]), code[0]]
        done = code.end()
    return "".join((*pieces, LINK.sub(changed, text[done:])))


def git(root: Path, *arguments: str) -> str:
    """What git prints of a clone; "" without git, and where root is no clone itself: an sdist may
    lie in somebody's."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def repository(root: Path, variable: str | None) -> Repository | None:
    """What the environment names, else the clone; an empty variable is none. Exits with one line
    for a variable that is no address; its value may hold a password, so it is not shown."""
    # As it was written down: insteadOf may put in a mirror, or a token.
    given = git(root, "config", "--get", "remote.origin.url") if variable is None else variable
    address = address_of(given)
    if variable and address is None:
        raise SystemExit(f"{VARIABLE} is no public http(s) address of a repository")
    return None if address is None else Repository(address, version_ref(root))


def version_ref(root: Path) -> str:
    """The version's tag where it is on this commit, or no commit is known; else the commit."""
    (version,) = re.findall(r'VERSION = "(.+)"', (root / "compress/version.py").read_text())
    tag, commit = f"v{version}", git(root, "rev-parse", "HEAD")
    return tag if not commit or tag in git(root, "tag", "--points-at", "HEAD").split() else commit


def described(root: Path, variable: str | None) -> tuple[dict[str, str], str]:
    """Project URLs and long description."""
    carried = root / "PKG-INFO"
    if variable is None and carried.exists():
        metadata = email.message_from_string(carried.read_text(encoding="utf-8"))
        urls = [line.partition(", ") for line in metadata.get_all("Project-URL", [])]
        return {label: url for label, _, url in urls}, str(metadata.get_payload())
    text, found = (root / "README.md").read_text(encoding="utf-8"), repository(root, variable)
    return ({}, text) if found is None else (found.urls(), absolute_links(text, found.link))


if __name__ == "__main__":  # so setuptools runs it
    project_urls, description = described(ROOT, os.environ.get(VARIABLE))
    if not project_urls and {"bdist_wheel", "sdist"} & set(sys.argv):
        print(NONE, file=sys.stderr)
    setup(
        project_urls=project_urls,
        long_description=description,
        long_description_content_type="text/markdown",
    )
