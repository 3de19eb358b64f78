"""A hub on loopback that repositories are created in and committed to, as huggingface_hub does it without xet.

`answers` and `stall_put` make it fail: it counts each request, so that a test sees what was sent twice.
"""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
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
        self.requests.append((request.method, request.path))
        if request.method == "GET" and path == "/api/whoami-v2":
            return 200, {"name": self.user, "type": "user", "orgs": [], "auth": {"type": "access_token"}}
        if request.method == "GET" and path.startswith("/api/models/"):
            return self.facts("/".join(path.split("/")[3:5]))
        if request.method == "PUT":
            return self.upload(path.rsplit("/", 1)[1], request.body)
        if request.method != "POST":
            return 404, {"error": "not found"}
        if path.startswith("/verify/"):
            return 200, {}
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            return self.create(request.json)
        if path.endswith("/preupload/main"):
            names = [one["path"] for one in request.json["files"]]
            modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
            files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            return 200, {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [self.transfer(**one) for one in request.json["objects"]]
            return 200, {"transfer": "basic", "objects": objects}, GIT_LFS
        if path == "/api/validate-yaml":
            assert request.json["content"].startswith("---")
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/commit/main"):
            return self.commit("/".join(path.split("/")[3:5]), request.body)
        return 404, {"error": "not found"}

    def facts(self, name: str) -> Answer:
        repo = self.repositories.get(name)
        if repo is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        files = [{"rfilename": one} for one in repo.files]
        return 200, {"id": name, "private": repo.private, "tags": repo.tags, "siblings": files, "sha": "0" * 40}

    def upload(self, name: str, body: bytes) -> Answer:
        status = self.answers.pop(0) if self.answers else 0
        while self.stall_put.is_set():
            threading.Event().wait(0.05)
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
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "header":
                repo.commits.append(value["summary"])
        if b"- hangproof" in repo.files.get("README.md", b""):
            repo.tags = ["hangproof"]
        made = {"commitOid": "c" * 40, "commitUrl": f"{self.url}/{name}/commit/{'c' * 40}", "pullRequestUrl": None}
        return 200, {"success": True, "hookOutput": "", **made}


GIT_LFS = {"Content-Type": "application/vnd.git-lfs+json"}


@contextmanager
def serving_hub():
    with running(Hub()) as hub:
        try:
            yield hub
        finally:
            hub.stall_put.clear()
