"""Downloads from a local server that fails in every way; the final name appears only once the content is verified."""

import fnmatch
import hashlib
import http.server
import json
import threading
import urllib.parse

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from handgrad.data import hub
from handgrad.data.hub import ATTEMPTS, choose_files, download, find_hub, is_hub_name
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.sources import Download
from handgrad.errors import DataError, StorageError
from handgrad.evaluation.tasks import load_tasks

CONTENT = bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; the next ones fail as `faults` says: a status, "drop", "short", "wrong", "no range", a URL,
    "length" (no number), "endless"."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/file": CONTENT}
        self.faults: list = []
        self.sent = 0  # bytes of endless bodies
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        path, wanted = self.path.partition("?")[0], self.headers.get("Range")
        self.server.requests.append((path, wanted, self.headers.get("Authorization")))
        fault = self.server.faults.pop(0) if self.server.faults else None
        content = self.server.files.get(path)
        if isinstance(fault, int) or content is None:
            return self.reply(fault or 404, b"")
        if isinstance(fault, str) and fault.startswith("http"):
            self.send_response(302)
            self.send_header("Location", fault)
            self.end_headers()
            return None
        if fault == "wrong":
            content = bytes(len(content))
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and fault != "no range" else 0
        if start > len(content):
            return self.reply(416, b"")
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if fault == "short":
            body = body[:1000]  # and says so: only the size that the hub told gives it away
        self.send_header("Content-Length", {"length": "abc", "endless": str(1 << 40)}.get(fault, str(len(body))))
        self.end_headers()
        while fault == "endless":
            self.server.sent += self.connection.send(bytes(1 << 16))  # until nobody reads it
        if fault == "drop":
            self.wfile.write(body[: len(body) // 2])
            return self.connection.close()
        return self.wfile.write(body)

    def do_POST(self):
        """The hub's question for sizes and hashes of named files."""
        asked = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        entries = []
        for path in asked["paths"]:
            content = next(c for name, c in self.server.files.items() if name.endswith(f"/{path}"))
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry = {"type": "file", "path": path, "size": len(content), "oid": git}
            if fnmatch.fnmatch(path, "*.parquet"):
                entry["lfs"] = {"size": len(content), "oid": hashlib.sha256(content).hexdigest(), "pointerSize": 130}
            entries.append(entry)
        self.reply(200, json.dumps(entries).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(hub, "BACKOFF_SECONDS", 0.001)
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def source(server, **changes) -> Download:
    return Download(**({"url": f"{server.url}/file", "size_bytes": len(CONTENT), "sha256": SHA256} | changes))


def test_without_a_fault(server, tmp_path):
    seen = []
    download(source(server), tmp_path / "deep" / "file", lambda done, total: seen.append((done, total)))
    assert (tmp_path / "deep" / "file").read_bytes() == CONTENT and seen[-1] == (len(CONTENT), len(CONTENT))
    download(source(server), tmp_path / "deep" / "file")
    assert len(server.requests) == 1  # there already


@pytest.mark.fault(24)
@pytest.mark.parametrize("faults", [[500], [503, 429, 500], ["drop"], ["drop", "drop", 500, "drop"], ["short"], ["wrong"]])
def test_faults_that_pass(server, tmp_path, faults):
    server.faults = list(faults)
    download(source(server), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT and not server.faults
    assert len(server.requests) > len(faults) and [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("length", ["length", "endless"])
def test_sizes_that_a_server_makes_up(server, tmp_path, length, monkeypatch):
    monkeypatch.setattr(hub, "BLOCK_BYTES", 1 << 16)
    server.faults = [length]
    download(source(server), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    server.faults = [length] * ATTEMPTS
    told = {"length": "found a Content-Length of 'abc' in 5 attempts", "endless": r"expected \d+ bytes, found \d+"}[length]
    with pytest.raises((DataError, StorageError), match=told):
        download(source(server), tmp_path / "other")
    assert server.sent < 64 << 20, "no more than fits between the two"


@pytest.mark.fault(24)
def test_a_dropped_download_goes_on_where_it_stopped(server, tmp_path):
    server.faults = ["drop"]
    download(source(server), tmp_path / "file")
    assert [wanted for _, wanted, _ in server.requests] == [None, f"bytes={len(CONTENT) // 2}-"]


@pytest.mark.fault(24)
def test_a_later_run_goes_on_too(server, tmp_path):
    server.faults = ["drop"] + [500] * ATTEMPTS
    with pytest.raises(StorageError, match=r"found HTTP 500 in 5 attempts.*goes on from"):
        download(source(server), tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert (tmp_path / "file.partial").read_bytes() == CONTENT[: len(CONTENT) // 2]
    download(source(server), tmp_path / "file")
    assert server.requests[-1][1] == f"bytes={len(CONTENT) // 2}-" and (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges(server, tmp_path):
    server.faults = ["drop", "no range"]
    download(source(server), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT and len(server.requests) == 2


@pytest.mark.parametrize("partial", [b"other content", CONTENT + b"more", CONTENT, bytes(len(CONTENT))])
def test_a_partial_file_of_any_kind(server, tmp_path, partial):
    (tmp_path / "file.partial").write_bytes(partial)
    download(source(server), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.fault(24)
def test_wrong_content_never_gets_the_name(server, tmp_path):
    git = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()
    download(source(server, sha256=None, git_sha1=git), tmp_path / "control")
    for changes in ({"sha256": "0" * 64}, {"sha256": None, "git_sha1": "0" * 40}, {"size_bytes": len(CONTENT) - 1}):
        server.faults = ["drop"]  # progress in between must not make it go on for ever
        with pytest.raises(DataError, match=r"expected (sha256|sha1|\d+ bytes)"):
            download(source(server, **changes), tmp_path / "file")
        assert [path.name for path in tmp_path.iterdir()] == ["control"]


@pytest.mark.parametrize(("status", "message"), [(404, "check the name"), (401, "log in"), (403, "log in")])
def test_what_no_retry_can_help(server, tmp_path, status, message):
    server.faults = [status]
    with pytest.raises(DataError, match=f"HTTP {status}; .*{message}"):
        download(source(server), tmp_path / "file")
    assert len(server.requests) == 1


def test_no_server(server, tmp_path):
    server.shutdown()
    server.server_close()
    with pytest.raises(StorageError, match="no answer"):
        download(source(server), tmp_path / "file")


def test_a_disk_error_is_not_taken_for_the_network(server, tmp_path):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="writing"):
        download(source(server), tmp_path / "blocked" / "file")
    assert not server.requests


def test_the_token_stays_with_the_hub(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    storage = Server()
    server.faults = [f"{storage.url}/file"]
    download(source(server), tmp_path / "file")
    assert [token for *_, token in server.requests + storage.requests] == ["Bearer hf_secret", None]
    storage.shutdown()
    storage.server_close()


# ---- datasets


@pytest.fixture
def dataset(server, tmp_path, monkeypatch):
    """A hub with one dataset: two parquet files of training rows, a validation file and a card."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for n, name in enumerate(("train-0", "train-1", "validation-0")):
        table = pyarrow.table({"text": [f"{name} document {i}" for i in range(300)], "n": [n] * 300})
        pyarrow.parquet.write_table(table, tmp_path / "table")
        server.files[f"/datasets/owner/name/resolve/c0ffee/data/{name}.parquet"] = (tmp_path / "table").read_bytes()
    (tmp_path / "table").unlink()
    siblings = [
        {"rfilename": name}
        for name in ("README.md", *(f"data/{n}.parquet" for n in ("train-0", "train-1", "validation-0")))
    ]
    info = {
        "id": "owner/name",
        "sha": "c0ffee",
        "private": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": siblings,
    }
    server.files["/api/datasets/owner/name"] = json.dumps(info).encode()
    return server


def test_a_dataset_is_prepared_from_the_hub_and_found_again_without_it(dataset, tmp_path):
    options = PrepareOptions("owner/name", tmp_path / "out", "bytes", validation_fraction=0.1)
    dataset.faults = [500]
    seen = []
    result = prepare(options, seen.append)
    manifest = result.dataset.manifest
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"] == 600
    assert [url.rpartition("/")[2] for url in manifest["urls"]] == ["train-0.parquet", "train-1.parquet"]
    assert {p.phase.partition(" ")[0] for p in seen} == {"downloading", "tokenising"}
    dataset.requests.clear()
    assert prepare(options).already_prepared and not dataset.requests


def test_a_limit_fetches_only_what_it_needs(dataset, tmp_path):
    result = prepare(PrepareOptions("owner/name", tmp_path / "out", "bytes", documents=250))
    assert sum(split["documents"] for split in result.dataset.manifest["splits"].values()) == 250
    assert [path.rpartition("/")[2] for path, *_ in dataset.requests if "resolve" in path] == ["train-0.parquet"]


def test_conversations_from_the_hub(dataset, tmp_path):
    rows = [{"prompt": f"Is it {i}?", "completion": "It is.", "n": i} for i in range(300)]
    for path in (path for path in dataset.files if "resolve" in path):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table")
        dataset.files[path] = (tmp_path / "table").read_bytes()
    result = prepare(PrepareOptions("owner/name", tmp_path / "out", "bytes", documents=250, chat=True))
    splits = result.dataset.manifest["splits"].values()
    assert sum(split["documents"] for split in splits) == 250 and all(split["trained_tokens"] for split in splits)
    assert [path.rpartition("/")[2] for path, *_ in dataset.requests if "resolve" in path] == ["train-0.parquet"]


def test_a_damaged_download_of_a_dataset(dataset, tmp_path):
    options = PrepareOptions("owner/name", tmp_path / "out", "bytes")
    dataset.faults = [None, "wrong", "wrong"]
    with pytest.raises(DataError, match="expected sha256"):
        prepare(options)
    assert not options.out.exists() and not list((tmp_path / "cache").rglob("*.parquet"))


def test_a_dataset_that_is_not_there(dataset):
    with pytest.raises(DataError, match="no such public dataset"):
        find_hub("owner/other")
    with pytest.raises(DataError, match="configuration 'large'"):
        find_hub("owner/name:large")
    dataset.faults = [500] * 50
    with pytest.raises(StorageError, match=r"asking .* failed"):
        find_hub("owner/name")


def test_offline_is_said_at_once(dataset, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE"):
        find_hub("owner/name")
    assert not dataset.requests


def test_shakespeare(server, tmp_path, make_text, monkeypatch):
    text = make_text(20_000).encode()
    server.files["/file"] = text
    sha256 = hashlib.sha256(text).hexdigest()
    monkeypatch.setattr(hub, "SHAKESPEARE", source(server, size_bytes=len(text), sha256=sha256))
    result = prepare(PrepareOptions("shakespeare", tmp_path / "out", "bytes"))
    splits = result.dataset.manifest["splits"]
    assert splits["train"]["text_bytes"] + splits["validation"]["text_bytes"] == len(text)


CARD = [
    {"config_name": "default", "data_files": [{"split": "train", "path": "data/*/*"}]},
    {
        "config_name": "sample-10BT",
        "data_files": [{"split": "train", "path": ["sample/10BT/*"]}, {"split": "test", "path": "x/*"}],
    },
]
NAMES = ["README.md", "data/CC/0.parquet", "sample/10BT/0.parquet", "sample/100BT/0.parquet", "x/0.parquet", "big/a.jsonl"]


@pytest.mark.parametrize(
    ("configs", "config", "chosen"),
    [
        (CARD, "sample-10BT", ["sample/10BT/0.parquet"]),
        (CARD, "", ["data/CC/0.parquet"]),
        (CARD, "big", ["big/a.jsonl"]),
        (None, "100BT", ["sample/100BT/0.parquet"]),
        ([{"config_name": "only", "data_files": "x/*"}], "", ["x/0.parquet"]),
        ([{"config_name": "all", "data_files": "*"}], "", NAMES[1:]),  # its README.md is no text to learn
        ([3, {"config_name": ["odd"]}, {"data_files": 7}], "", [n for n in NAMES if n.endswith("parquet")]),
    ],
)
def test_which_files_of_a_dataset(configs, config, chosen):
    assert choose_files(NAMES, configs, config, "o/n") == chosen


def test_which_files_without_a_card():
    assert choose_files(["train.jsonl", "test.jsonl", "train.txt"], None, "", "o/n") == ["train.jsonl"]
    assert choose_files(["a.txt", "b.txt", "c.csv"], None, "", "o/n") == ["a.txt", "b.txt"]
    assert choose_files(["alpaca.json", "dataset_infos.json"], None, "", "o/n") == ["alpaca.json"]
    with pytest.raises(DataError, match="found none"):
        choose_files(["a.csv"], None, "", "o/n")


def test_which_names_are_the_hubs():
    assert all(map(is_hub_name, ["fineweb", "shakespeare", "owner/name", "owner/na-me.x:sample-10BT"]))
    assert not any(map(is_hub_name, ["stories", "folder/a.txt", "a/b/c", "/etc/passwd", "../x", "folder/a.parquet", "a/*"]))


MMLU_CARD = [
    {
        "config_name": config,
        "data_files": [{"split": split, "path": f"{config}/{split}-*"} for split in ("auxiliary_train", "test", "dev")],
    }
    for config in ("all", "anatomy")
]
MMLU_NAMES = [
    f"{config}/{split}-0.parquet" for config in ("all", "anatomy") for split in ("auxiliary_train", "test", "dev")
]


def test_which_files_of_a_split():
    assert choose_files(MMLU_NAMES, MMLU_CARD, "all", "o/n", "test") == ["all/test-0.parquet"]
    assert choose_files(MMLU_NAMES, None, "anatomy", "o/n", "dev") == ["anatomy/dev-0.parquet"]
    assert choose_files(["data/validation-0.parquet", "data/train-0.parquet"], None, "", "o/n", "validation") == [
        "data/validation-0.parquet"
    ]
    for configs, config in ((None, ""), (MMLU_CARD, "all"), ([{"config_name": "default", "data_files": "all/*"}], "")):
        with pytest.raises(DataError):  # never another split than the one asked for
            choose_files([name for name in MMLU_NAMES if "test" not in name], configs, config, "o/n", "test")


def test_a_task_from_the_hub(server, tmp_path, monkeypatch):
    """The questions and the solved ones, each from its split; the second time from the cache."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for split, count in (("auxiliary_train", 9), ("test", 4), ("dev", 6)):
        rows = [{"question": f"{split} {n}?", "subject": "s", "choices": list("wxyz"), "answer": 1} for n in range(count)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table")
        server.files[f"/datasets/cais/mmlu/resolve/c0ffee/all/{split}-0.parquet"] = (tmp_path / "table").read_bytes()
    siblings = [{"rfilename": name} for name in MMLU_NAMES if name.startswith("all/")]
    info = {"id": "cais/mmlu", "sha": "c0ffee", "private": False, "downloads": 0, "likes": 0, "tags": []}
    info |= {"siblings": siblings, "cardData": {"configs": MMLU_CARD}}
    server.files["/api/datasets/cais/mmlu"] = json.dumps(info).encode()
    for _ in range(2):
        (task,) = load_tasks("mmlu,mmlu_dev", limit=3)
        assert len(task.examples) == 3 and list(task.sources) == ["test-0.parquet", "dev-0.parquet"]
        context = task.examples[2].context
        assert [f"dev {n}?" in context for n in range(6)] == [True] * 5 + [False] and "test 2?" in context
    assert sum("/resolve/" in path for path, *_ in server.requests) == 2
