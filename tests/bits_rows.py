"""Makes the rows of bits.py: runs a tiny model, asks it, exports it, and returns digests of all that came out.

bits_rows.txt has the table of the rows; those that are more than a run have a function here.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import handgrad  # loads no torch yet: that comes with the first name that needs it, after the next lines

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "MASTER_ADDR": "127.0.0.1", "COLUMNS": "100"}

ROWS = Path(__file__).with_name("bits_rows.txt")
TEXTS = ["the old river", "bright crow walks under hill", "s"]
KINDS = ("step", "validation", "sample", "event", "fp8", "evaluation", "end")  # the other records are of times and machines
TIMES = ("step_ms", "tokens_per_second", "time")
STATE = ("step", "vocab_size", "tokenizer", "identity", "loss_window", "norm_window", "skips_in_a_row", "loss_scale", "fp8")
VERSIONS = r"\| (handgrad|sources|torch|device|triton|products|attention) \|.*\n|(?<=handgrad )\d[\w.]*"  # in a model card
RANKS_SECONDS = 180

Result = dict[str, Any]
Settings = dict[str, Any]
Phase = tuple[int, int | None, Settings]  # a start of a run: on so many ranks, for so many steps, with settings of its own


# Digests.


def digest(*parts: Any) -> str:
    """The SHA-256, shortened, of bytes and of anything else as JSON, which keeps every digit of a float."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode())
    return f"sha256:{found.hexdigest()[:24]}"


def of_tensor(tensor: Any) -> str:
    import torch

    plain = tensor.detach().cpu().contiguous()
    return digest([str(plain.dtype), list(plain.shape)], plain.flatten().view(torch.uint8).numpy().tobytes())


def of_safetensors(*paths: Path) -> str:
    """The digest of the files' tensors by name, each with its dtype, shape and bytes."""
    found: dict[str, list[Any]] = {}
    for content in (path.read_bytes() for path in paths):
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, last = (start + offset for offset in entry["data_offsets"])
                found[name] = [[name, entry["dtype"], entry["shape"]], content[first:last]]
    return digest(*(part for name in sorted(found) for part in found[name]))


# A row at work.


class RanksFailed(Exception):
    """Ranks that did not come to a good end."""


@dataclasses.dataclass
class Bench:
    """The place where a row is made: a folder of its own, one that its process keeps, the device."""

    home: Path
    shared: Path
    device: str

    def told(self, text: str) -> str:
        """`text` without the folders of this time."""
        return text.replace(str(self.home), "HOME").replace(str(self.shared), "SHARED")

    def data(self, tokenizer: str = "bytes") -> Path:
        """Shards of a text with a little structure, a document a line, made by the first row that wants them."""
        text, rows, folder = (self.shared / name for name in ("text.txt", "text.jsonl", tokenizer))
        if not text.exists():
            words, number, picked = ("river", "stone", "old", "bright", "walks", "under", "the", "hill", "crow"), 1, ""
            for _ in range(6000):
                number = (number * 1103515245 + 12345) % 2**31
                picked += words[(number >> 16) % len(words)] + (".\n" if (number >> 24) % 9 == 0 else " ")
            text.write_text(picked)
            rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in picked.splitlines()))
        if not folder.exists():
            handgrad.prepare(rows, folder, tokenizer=tokenizer, validation_fraction=0.1)
        return folder

    def train(self, *phases: Phase, name: str = "run", **settings: Any) -> Result:
        """A run in the folder `name`, and what it left. A setting that is None is not given."""
        run, errors = self.home / name, []
        for ranks, count, changes in phases or ((1, None, {}),):
            given = {**settings_of("SMALL"), "out": run, "device": self.device, **settings, **changes}
            given["data"] = self.data(given.pop("tokenizer", "bytes"))
            given = {key: value for key, value in given.items() if value is not None}
            try:
                make_steps(given, count) if ranks == 1 else self.on_ranks(ranks, given, count)
            except (handgrad.HandgradError, RanksFailed) as error:
                errors.append(self.told(f"{type(error).__name__}: {error}"))
        return self.outcome(run) | ({"errors": errors} if errors else {})

    def on_ranks(self, size: int, settings: Settings, count: int | None) -> None:
        """The same in several processes. They are forked where that can be: an import takes longer than such a run."""
        from torch.distributed import TCPStore

        context: Any = multiprocessing.get_context("fork" if self.device == "cpu" else "spawn")
        # Hosted here, as torchrun's agent does: a free port that is only looked up may be another row's when rank 0 comes.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        said = [self.home / f"rank{rank}" for rank in range(size)]
        places = [(rank, rank, size, size, store.port) for rank in range(size)]
        ranks = [context.Process(target=as_rank, args=(*pair, settings, count)) for pair in zip(places, said, strict=True)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + RANKS_SECONDS
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        if any(process.exitcode for process in ranks):
            lines = [file.read_text(errors="replace").splitlines() for file in said]
            told = {line for spoken in lines for line in spoken if line.startswith("handgrad: ")}
            last = sorted(told) or [spoken[-1] for spoken in lines if spoken]
            raise RanksFailed(f"{[process.exitcode for process in ranks]} {'; '.join(last)}")

    def outcome(self, run: Path) -> Result:
        """The content of a run's folder: its checkpoints, the newest one's content, the records of each kind."""
        found: Result = {}
        if checkpoints := sorted((run / "checkpoints").glob("step_*")):
            newest = checkpoints[-1]
            manifest = json.loads((newest / "manifest.json").read_text())
            found["checkpoints"] = [int(folder.name.removeprefix("step_")) for folder in checkpoints]
            found["weights"] = of_safetensors(*newest.glob("model*.safetensors"))
            found["moments"] = of_safetensors(*newest.glob("optimizer*.safetensors"))
            found["state"] = digest({key: manifest.get(key) for key in STATE})
        if (run / "metrics.jsonl").exists():
            records = [json.loads(self.told(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for kind in KINDS:
                told = [{k: v for k, v in line.items() if k not in TIMES} for line in records if line["kind"] == kind]
                found |= {f"{kind} records": f"{len(told)} of {digest(told)}"} if told else {}
            found["last losses"] = [line["loss"] for line in records if line["kind"] == "step"][-3:]
            found["main.log"] = digest((run / "main.log").read_bytes())
        return found

    def command(self, *arguments: Any) -> Result:
        """`python -m handgrad` in this process: its exit code, what it printed, its errors."""
        said, errors, before, code = io.StringIO(), io.StringIO(), sys.argv, None
        sys.argv = ["handgrad", *map(str, arguments)]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            try:
                runpy.run_module("handgrad", run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code
            finally:
                sys.argv = before
        lines = [line for line in errors.getvalue().splitlines() if line.startswith("handgrad: ")]
        return {"code": code, "said": self.told(said.getvalue()), "errors": [self.told(line) for line in lines]}


def make_steps(settings: Settings, count: int | None) -> None:
    with handgrad.Training(quiet=True, **settings) as run:
        run.steps(count)


def as_rank(place: tuple[int, ...], said: Path, settings: Settings, count: int | None) -> None:
    """A process's part of a run."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ |= {name: str(value) for name, value in zip(names, place, strict=True)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with said.open("w", buffering=1) as sys.stderr:
        os.dup2(sys.stderr.fileno(), 2)
        try:
            make_steps(settings, count)
        except handgrad.HandgradError as error:
            print(f"handgrad: {error}", file=sys.stderr)
            os._exit(error.exit_code)


# Rows that are more than a run.


def loaded(bench: Bench, **options: Any) -> Result:
    """The output of a model loaded from a run."""
    bench.train(**settings_of("TAUGHT"))
    model = handgrad.load(bench.home / "run", device=bench.device, **options)
    text, long = TEXTS[0], " ".join(TEXTS * 3)
    write: Callable[..., Any] = functools.partial(model.generate, max_tokens=24)
    held_out = [handgrad.evaluate(model, **sizes) for sizes in ({}, {"micro_batch": 3, "eval_tokens": 999})]
    return {
        "logits": of_tensor(model.logits(TEXTS)),
        "losses": of_tensor(model.losses([*TEXTS, long])),  # the last is longer than a context
        "loss": [model.loss(text), model.loss(long)],
        "held out": [[found.loss, found.perplexity, found.bits_per_byte, found.tokens] for found in held_out],
        "greedy": write([*TEXTS, ""], temperature=0),
        "sampled": [write(text, seed=seed, temperature=heat) for seed, heat in ((0, 0.3), (1, 0.8), (2, 1.5))],
        "top_k": write(text, top_k=5, seed=3),
        "top_p": write(text, top_p=0.7, seed=3),
        "min_p": write(text, min_p=0.1, seed=3),
        "repetition_penalty": [write(text, repetition_penalty=1.5), write(text, repetition_penalty=1.2, temperature=0)],
        "all options": write(text, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.1, temperature=0.7, seed=9),
        "stop": [write(text, stop=" "), write(text, stop=["er", "o"])],
        "batch": write([*TEXTS, "", text[:5]], batch=2, seed=5),
        "longer than a context": [model.generate(text, max_tokens=90), model.generate([text, long], max_tokens=40)],
        "stream": "".join(model.stream(text, max_tokens=24, seed=4)),
    }


def in_pieces(bench: Bench, **settings: Any) -> Result:
    """Steps made in several calls, the model looked at in between."""
    given = {**settings_of("SMALL"), "data": bench.data(), "out": bench.home / "run", "device": bench.device, **settings}
    looks: list[str] = []
    with handgrad.Training(quiet=True, **given) as run:
        run.steps(1)
        run.steps(3, on_step=lambda step: looks.append(of_tensor(run.model().logits(TEXTS))))
        run.save()
        looks.append(run.model().generate("a", max_tokens=8))
        run.steps()
    return bench.outcome(bench.home / "run") | {"looks": looks}


def exported(bench: Bench, to: str, dtype: str, **settings: Any) -> Result:
    """A run exported, the files read and imported."""
    bench.train(**settings)
    run, out, back = (bench.home / name for name in ("run", "out", "back"))
    source = out / "model.bin" if to == "llmc" else out
    done = handgrad.export(run, out, to=to, dtype=dtype)
    logits = of_tensor(handgrad.load(source, device=bench.device).logits(TEXTS))
    found = {"rounding": done.rounding, "logits": logits, "import": bench.command("import", source, "--out", back)}
    found |= {f"imported {key}": value for key, value in bench.outcome(back).items()}
    for path in sorted(out.iterdir()):
        content = path.read_bytes()
        if path.name == "README.md":
            content = re.sub(VERSIONS, "", bench.told(content.decode())).encode()
        found[path.name] = digest(content)
    return found


def started(bench: Bench, *phases: Phase, source: str = "source", **settings: Any) -> Result:
    """A run that starts from the weights of another one, or of its export."""
    bench.train(name="source", steps=4, eval_every=2, keep_best=True)
    if (to := source.partition("/")[0]) != "source":
        handgrad.export(bench.home / "source", bench.home / to, to=to)
    return bench.train(*phases, init_from=bench.home / source, **settings)


def commands(bench: Bench) -> Result:
    """The commands' output about a run."""
    bench.train(**settings_of("TAUGHT"))
    run, prompts, texts = (bench.home / name for name in ("run", "prompts.jsonl", "texts.jsonl"))
    prompts.write_text("".join(json.dumps({"prompt": text, "max_tokens": 9 + len(text)}) + "\n" for text in TEXTS))
    sample = functools.partial(bench.command, "sample", run, "--device", bench.device)
    return {
        "sample": sample("--prompt", "the", "--samples", 3, "--max-tokens", 20),
        "greedy": sample("--temperature", 0, "--stop", "ow", "--max-tokens", 60),
        "file": sample("--in", prompts, "--out", texts, "--batch", 2),
        "texts": texts.read_text(),
        "evaluate": bench.command("evaluate", run, "--device", bench.device, "--eval-tokens", 512, "--precision", "bf16"),
        "no run": bench.command("sample", bench.home / "nothing"),
        "no setting": bench.command("train", "tiny", "--chanels", 3),
        "help": digest(bench.command("train", "--help")["said"]),
    }


def train_command(bench: Bench, ranks: int = 1) -> Result:
    """`handgrad train` with a recipe and flags, in processes of its own."""
    recipe, run = bench.home / "recipe.toml", bench.home / "run"
    recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings_of("SMALL").items()))
    flags = ("--config", recipe, "--data", bench.data(), "--out", run, "--device", bench.device, "--lanes", 2)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    command = [sys.executable, *launcher, "-m", "handgrad", "train", *map(str, flags)]
    environment = {**os.environ, "PYTHONPATH": str(Path(handgrad.__file__).parents[1])}
    ended = subprocess.run(command, cwd=bench.home, env=environment, capture_output=True, timeout=RANKS_SECONDS)
    return bench.outcome(run) | {"code": ended.returncode}


def task_files(bench: Bench) -> str:
    """Files of tasks made up here, as `--tasks` names them."""
    names = ("own", "lambada", "hellaswag")
    words = (bench.data().parent / "text.txt").read_text().split()
    rows = [(words[n], words[n + 1], [f"{words[n + k]} {words[n + 9 + k]}" for k in range(4)]) for n in range(11)]
    lines = {
        "own": [{"context": a, "choices": endings, "answer": len(b) % 4} for a, b, endings in rows],
        "lambada": [{"text": f"{a} {b} {endings[0]}"} for a, b, endings in rows],
        "hellaswag": [
            {"activity_label": a, "ctx_a": b, "ctx_b": "", "ctx": f"{b} {a}", "endings": endings, "label": len(a) % 4}
            for a, b, endings in rows
        ],
    }
    for name in names:
        (bench.home / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[name]))
    return ",".join(f"{name}={bench.home / name}.jsonl" for name in names)


def tasks(bench: Bench, precision: str) -> Result:
    """Tasks on a run, by the command."""
    bench.train(**settings_of("TAUGHT"))
    rows, device = bench.home / "rows.jsonl", ("--device", bench.device, "--precision", precision)
    said = bench.command("evaluate", bench.home / "run", "--tasks", task_files(bench), "--out", rows, *device)
    return said | {"rows": digest(bench.told(rows.read_text()).encode())}


def tasks_in_training(bench: Bench, *phases: Phase, **settings: Any) -> Result:
    return bench.train(*phases, eval_tasks=task_files(bench), eval_task_examples=6, **settings)


def prepared(bench: Bench, source: str, **options: Any) -> Result:
    """The bytes of shards, and what their manifest says of them."""
    folder, given = bench.home / "shards", bench.data().parent / source
    data = handgrad.prepare(given if given.exists() else source, folder, **options)
    manifest = json.loads((folder / "manifest.json").read_text())
    found = {path.name: digest(path.read_bytes()) for path in sorted(folder.iterdir()) if path.name != "manifest.json"}
    return found | {"identity": data.identity, "manifest": digest(manifest["tokenizer"], manifest["splits"])}


def presets(bench: Bench, names: str) -> Result:
    """The settings of the named starting points."""
    return {name: digest(dataclasses.asdict(handgrad.preset(name))) for name in names.split(",")}


# The table.


@functools.cache
def table() -> dict[str, list[str]]:
    """The words of all rows and of all names in capitals."""
    found: dict[str, list[str]] = {}
    for line in ROWS.read_text().splitlines():
        name, _, text = line.partition(": ")
        if line.startswith("#") or not text:
            continue
        for chosen in itertools.product(*(group.split() for group in re.findall(r"{(.*?)}", name))):
            row = re.sub(r"{.*?}", "{}", name).format(*chosen)
            assert row.isupper() or row not in found, f"two rows are called {row}"
            words = text.format(*chosen).split()
            found.setdefault(row, []).extend(part for word in words for part in (found[word] if word.isupper() else [word]))
    return found


def setting(word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def settings_of(name: str) -> Settings:
    return dict(setting(word) for word in table()[name] if "=" in word and word[0] != "@")


def phases_of(name: str) -> Iterator[Phase]:
    for word in table()[name]:
        if word[0] == "@":
            start, *changes = word[1:].split(";")
            ranks, _, count = start.partition(":")
            yield int(ranks), int(count) if count else None, dict(map(setting, changes))


def make_row(name: str, device: str, shared: Path) -> tuple[str, Result, float]:
    """A row in a process of the pool, which keeps its data from row to row."""
    begun, kept = time.monotonic(), shared / str(os.getpid())
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(Path(home), kept, device)
        words = [word for word in table()[name] if word.isidentifier()]
        make: Callable[..., Result] = globals()[words[-1]] if words else Bench.train
        try:
            found = make(bench, *phases_of(name), **settings_of(name))
        except Exception as error:  # whatever ends a row is its result: `record` prints it and `compare` holds it
            found = {"errors": [bench.told(f"{type(error).__name__}: {error}")]}
    return name, found, time.monotonic() - begun
