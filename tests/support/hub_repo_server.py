"""A hub on loopback that repositories are created in and committed to, as huggingface_hub does it without xet.

`answers` and `stall_put` make it fail: it counts each request, so that a test sees what was sent twice.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from loopback import Answer, Double, Request, running

TOKEN = "hf_write_token_of_the_test"
LARGE = (".safetensors", ".png", ".jpg")


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)


class Hub(Double):
    """`repositories` by id; `objects`: LFS contents by sha256; `puts`: sha256 of each complete upload."""

    def __init__(self):
        super().__init__(self.reply)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.answers: list[int] = []  # status codes of the next uploads, 0 for a good one
        self.stall_put = threading.Event()  # while set, an upload is read and not answered
        self.user = "me"

    def reply(self, request: Request) -> Answer:
        path = urlsplit(request.path).path
        repo = "/".join(path.split("/")[3:5])
        self.requests.append((request.method, request.path))
        match request.method, path.rsplit("/", 2)[1:]:
            case "GET", ["api", "whoami-v2"]:
                return 200, {"name": self.user, "type": "user", "orgs": [], "auth": {"type": "access_token"}}
            case "GET", _ if path.startswith("/api/models/"):
                return self.facts(repo)
            case "PUT", [_, name]:
                return self.upload(name, request.body)
            case "POST", ["verify", _]:
                return 200, {}
            case "POST", _ if request.headers.get("authorization") != f"Bearer {TOKEN}":
                return 401, {"error": "Invalid username or password."}
            case "POST", ["repos", "create"]:
                return self.create(request.json)
            case "POST", ["preupload", "main"]:
                modes = {one["path"]: ("regular", "lfs")[one["path"].endswith(LARGE)] for one in request.json["files"]}
                files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
                return 200, {"files": files}
            case "POST", ["objects", "batch"]:
                objects = [self.transfer(**one) for one in request.json["objects"]]
                kind = {"Content-Type": "application/vnd.git-lfs+json"}
                return 200, {"transfer": "basic", "objects": objects}, kind
            case "POST", ["api", "validate-yaml"]:
                assert request.json["content"].startswith("---")
                return 200, {"errors": [], "warnings": []}
            case "POST", ["commit", "main"]:
                return self.commit(repo, request.body)
        return 404, {"error": "not found"}

    def facts(self, name: str) -> Answer:
        repo = self.repositories.get(name)
        if repo is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        files = [{"rfilename": one} for one in repo.files]
        return 200, {"id": name, "private": repo.private, "tags": repo.tags, "siblings": files, "sha": "0" * 40}

    def upload(self, name: str, body: bytes) -> Answer:
        status = self.answers.pop(0) if self.answers else 0
        while self.stall_put.is_set() and not self.closing.wait(0.05):
            pass
        if status:
            return status, {"error": "broken"}
        if hashlib.sha256(body).hexdigest() != name:
            return 400, {"error": "another content"}
        self.objects[name] = body
        self.puts.append(name)
        return 200, {}

    def create(self, wanted: dict) -> Answer:
        name = f"{wanted.get('organization') or self.user}/{wanted['name']}"
        url = f"{self.url}/{name}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": url}
        if not name.startswith(f"{self.user}/"):
            return 403, {"error": "You don't have the rights"}
        self.repositories[name] = Repository(wanted.get("private", False) or wanted.get("visibility") == "private")
        return 200, {"url": url, "name": name}

    def transfer(self, oid: str, size: int, **_) -> dict:
        """Where an LFS object is to be sent; nowhere when it is there."""
        if oid in self.objects:
            return {"oid": oid, "size": size}
        actions = {action: {"href": f"{self.url}/{action}/{oid}"} for action in ("upload", "verify")}
        return {"oid": oid, "size": size, "actions": actions}

    def commit(self, name: str, body: bytes) -> Answer:
        repo = self.repositories[name]
        for line in map(json.loads, body.splitlines()):
            match line["key"], line["value"]:
                case "file", {"path": path, "content": content}:
                    repo.files[path] = base64.b64decode(content)
                case "lfsFile", {"path": path, "oid": oid}:
                    repo.files[path] = self.objects[oid]
                case "header", {"summary": summary}:
                    repo.commits.append(summary)
        if b"- hangproof" in repo.files.get("README.md", b""):
            repo.tags = ["hangproof"]
        made = {"commitOid": "c" * 40, "commitUrl": f"{self.url}/{name}/commit/{'c' * 40}", "pullRequestUrl": None}
        return 200, {"success": True, "hookOutput": "", **made}


def serving_hub():
    return running(Hub())
