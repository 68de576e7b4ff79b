"""`handgrad sample`: what it prints, what it answers to a file of prompts, and one line for every mistake."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import handgrad
from handgrad.cli import main
from handgrad.commands import sample as sample_command
from handgrad.errors import ConfigError
from handgrad.generation import prompts
from handgrad.generation.generate import Decoder
from handgrad.machine import devices
from handgrad.run import evaluating
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.test_commands import SMALL, refused


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of four steps on bytes, with a context of 32."""
    folder = str(tmp_path_factory.mktemp("sampled") / "run")
    assert main(["train", *SMALL, "--data", str(shards), "--out", folder, "--sample-tokens", "0"]) == 0
    return folder


@pytest.fixture
def sample(run: str, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """The output of `handgrad sample RUN ...`."""

    def printed(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["sample", run, "--device", "cpu", *arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return printed


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path)


def test_samples_are_those_of_their_seeds(sample: Callable[..., str]) -> None:
    """Three at once, or in two slots, or one by one."""
    arguments = "--prompt", "the river", "--max-tokens", "50", "--temperature", "1"
    single = [sample(*arguments, "--seed", str(seed)) for seed in (5, 6, 7)]
    assert len(set(single)) == 3 and all(text.startswith("the river") and text.endswith("\n") for text in single)
    expected = "".join(f"--- sample {n + 1}, seed {5 + n}\n{text}" for n, text in enumerate(single))
    assert sample(*arguments, "--seed", "5", "--samples", "3") == expected
    assert sample(*arguments, "--seed", "5", "--samples", "3", "--batch", "2") == expected


@pytest.mark.parametrize(
    ("options", "equal"),
    [
        (("--temperature", "0"), True),
        (("--temperature", "0", "--repetition-penalty", "1.5"), False),
        (("--top-k", "1"), True),
        (("--top-p", "0.000001"), True),
        (("--min-p", "1"), True),
        (("--temperature", "0.000001"), True),
        (("--temperature", "1"), False),
    ],
)
def test_every_option_reaches_the_choice(sample: Callable[..., str], options: tuple[str, ...], equal: bool) -> None:
    """Each of them at the end where it is greedy, or is not."""
    greedy = sample("--max-tokens", "60", "--temperature", "0")
    assert (sample("--max-tokens", "60", *options) == greedy) is equal


def test_where_prompts_come_from(sample: Callable[..., str], run: str, tmp_path: Path) -> None:
    prompt = "the 東京 river\n over\r\n"
    expected = sample("--prompt", prompt, "--max-tokens", "9")
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt.encode())
    assert sample("--prompt-file", str(file), "--max-tokens", "9") == expected
    command = [
        sys.executable,
        "-m",
        "handgrad",
        "sample",
        run,
        "--prompt-file",
        "-",
        "--max-tokens",
        "9",
        "--device",
        "cpu",
    ]
    piped = subprocess.run(command, input=prompt.encode(), capture_output=True, env=os.environ | {"PYTHONUTF8": "1"})
    assert piped.returncode == 0 and piped.stdout.decode() == expected, piped.stderr
    last = piped.stderr.decode().splitlines()[-1]
    assert last.startswith("9 tokens in ") and last.endswith(" tokens/s"), "the speed, apart from the text"


def test_stop_strings(sample: Callable[..., str]) -> None:
    whole = sample("--max-tokens", "60", "--temperature", "1").removesuffix("\n")
    middle = whole[20:23]
    at = min(whole.index(middle), whole.index(whole[40]))
    found = sample("--max-tokens", "60", "--temperature", "1", "--stop", middle, "--stop", whole[40])
    assert found == whole[:at] + "\n"


def test_a_file_of_prompts(sample: Callable[..., str], tmp_path: Path) -> None:
    """In the order of the input, whoever is done first; the text of each is what it is alone."""
    rows = [{"prompt": "river " * n, "max_tokens": 40 - 7 * n, "id": f"n{n}", "nested": {"é": [n, None]}} for n in range(5)]
    rows.append({"prompt": "stone"})
    source, out = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    options = "--temperature", "1", "--max-tokens", "12"
    assert sample(*options, "--in", source, "--out", str(out), "--batch", "2", "--seed", "8") == ""
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(found) == 6
    for number, (row, answer) in enumerate(zip(rows, found, strict=True)):
        assert {key: answer[key] for key in row} == row and answer.keys() - row.keys() == {"text", "stopped", "tokens"}
        most = row.get("max_tokens", 12)
        alone = sample(
            "--temperature", "1", "--prompt", row["prompt"], "--max-tokens", str(most), "--seed", str(8 + number)
        )
        assert row["prompt"] + answer["text"] + "\n" == alone
        assert answer["stopped"] == ("max_tokens" if answer["tokens"] == most else "end_of_text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    letter = found[0]["text"][5]
    again = tmp_path / "stopped.jsonl"
    sample(*options, "--in", source, "--out", str(again), "--seed", "8", "--stop", letter)
    first = json.loads(again.read_text().splitlines()[0])
    assert first["stopped"] == "stop" and first["text"] == found[0]["text"].split(letter)[0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"nonsense", "expected a JSON object"),
        (b"\xff\xfe", "expected a JSON object"),
        (b"[" * 100_000, "expected a JSON object"),
        (b'["a"]', "found ['a']"),
        (b'{"text": "a"}', "expected text in 'prompt', found only the keys text"),
        (b'{"prompt": 3}', "expected text in 'prompt', found 3"),
        (b'{"prompt": "a", "max_tokens": 0}', "expected a whole number of 1 or more in 'max_tokens', found 0"),
        (b'{"prompt": "a", "max_tokens": true}', "in 'max_tokens', found True"),
        (b'{"prompt": "a", "stopped": 1}', "is a key of the output"),
    ],
)
def test_a_bad_line_is_named(line: bytes, told: str, run: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    message = refused(capsys, 65, "sample", run, "--in", str(source), "--out", str(tmp_path / "out.jsonl"))
    assert f"line 3 of {source}" in message and told in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def partial_numbers(path: Path) -> list[int]:
    """The numbers of the prompts whose texts an interrupted call has left, in their order."""
    return [json.loads(line)["number"] for line in path.read_text().splitlines()[1:]]


def test_a_batch_that_fails_leaves_its_texts_aside(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a file that came in between, an interrupt before the first text is done: OUT is whole or not there."""
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 3}] * 3), tmp_path / "out.jsonl"
    arguments = ["sample", run, "--in", source, "--out", str(out)]
    deliver = Decoder.deliver

    def interrupted(self: Decoder, launched: Any) -> Any:
        yield from deliver(self, launched)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Decoder, "deliver", interrupted)
        assert main(arguments) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], "no text is done"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    capsys.readouterr()
    with monkeypatch.context() as broken:
        broken.setattr(prompts.os, "fsync", full)
        assert main(arguments) == 74
    assert "No space left" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.partial"]
    assert sorted(partial_numbers(tmp_path / "out.jsonl.partial")) == [0, 1, 2]
    begin = Decoder.generate

    def overtaken(self: Decoder, texts: Any, *, reuse_cache: bool) -> Any:
        out.write_text("mine")
        yield from begin(self, texts, reuse_cache=reuse_cache)

    with monkeypatch.context() as broken:
        broken.setattr(Decoder, "generate", overtaken)
        assert main(arguments) == 64
    assert "already exists" in capsys.readouterr().err
    assert "already exists" in refused(capsys, 64, *arguments)
    assert out.read_text() == "mine" and len(list(tmp_path.iterdir())) == 3
    out.unlink()
    assert main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize("after", [1, 3, 4])
def test_an_interrupted_file_of_prompts_goes_on(
    after: int, run: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of an unbroken call; what was written is not written again, a line that a kill has cut is."""
    rows = [{"prompt": "river " * n, "max_tokens": 30 - 4 * n} for n in range(5)]
    source, out, whole = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    arguments = ["sample", run, "--in", source, "--batch", "2", "--temperature", "1", "--seed", "8", "--device", "cpu"]
    assert main([*arguments, "--out", str(whole)]) == 0
    done, entered, stream = 0, list[int](), sample_command.stream_text

    def interrupted(decoder: Any, tokenizer: Any, texts: Any, stops: Any) -> Any:
        nonlocal done
        for text, piece in stream(decoder, tokenizer, texts, stops):
            yield text, piece
            done += bool(text.stopped)
            if done == after:
                raise KeyboardInterrupt

    def noting(decoder: Any, tokenizer: Any, texts: Any, stops: Any) -> Any:
        waiting = list(texts)
        entered.extend(text.seed - 8 for text in waiting)
        yield from stream(decoder, tokenizer, iter(waiting), stops)

    with monkeypatch.context() as broken:
        broken.setattr(sample_command, "stream_text", interrupted)
        assert main([*arguments, "--out", str(out)]) == 130
    partial = tmp_path / "out.jsonl.partial"
    kept = partial_numbers(partial)
    assert len(kept) == after and not out.exists()
    with partial.open("a") as file:
        file.write('{"number": 4, "row": {"prompt": "ri')
    capsys.readouterr()
    other = {"--temperature": "0.5", "--seed": "9", "--stop": "x", "--batch": "3", "--precision": "bf16"}
    for name, value in other.items():
        message = refused(capsys, 78, *arguments, "--out", str(out), name, value)
        assert f"has texts of other {name.strip('-')}" in message
    changed = write_lines(tmp_path / "changed.jsonl", rows[::-1])
    assert "of other prompts" in refused(capsys, 78, *arguments, "--out", str(out), "--in", changed)
    with monkeypatch.context() as broken:
        broken.setattr(sample_command, "stream_text", interrupted)
        done = after - 1
        assert main([*arguments, "--out", str(out)]) == 130
    kept = partial_numbers(partial)
    assert len(kept) == after + 1
    monkeypatch.setattr(sample_command, "stream_text", noting)
    capsys.readouterr()
    assert main([*arguments, "--out", str(out)]) == 0
    assert f"resumes after {after + 1} of 5 prompts" in capsys.readouterr().err
    assert sorted(entered + kept) == [0, 1, 2, 3, 4]
    assert out.read_bytes() == whole.read_bytes() and not partial.exists()


def test_texts_of_another_model_are_refused(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    other = str(tmp_path / "other")
    assert main(["train", *SMALL, "--data", str(shards), "--out", other, "--seed", "5", "--sample-tokens", "0"]) == 0
    with pytest.raises(KeyboardInterrupt), prompts.whole_lines(out, {"weights": "of another"}) as (_, write):
        write(0, {"prompt": "a"})
        raise KeyboardInterrupt
    capsys.readouterr()
    assert "has texts of other prompts" in refused(capsys, 78, "sample", other, "--in", source, "--out", str(out))
    with pytest.raises(KeyboardInterrupt), prompts.whole_lines(out, {"weights": "of another"}) as (rows, _):
        assert rows == {0: {"prompt": "a"}}
        with pytest.raises(ConfigError, match="another process writes"), prompts.whole_lines(out, {}):
            pass
        raise KeyboardInterrupt
    (tmp_path / "out.jsonl.partial").write_text("mine\n")
    assert "expected a JSON object" in refused(capsys, 65, "sample", other, "--in", source, "--out", str(out))
    assert (tmp_path / "out.jsonl.partial").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--prompt", "a", "--prompt-file", "b"], 64, "one of --prompt, --prompt-file and --in"),
        (["--in", "a.jsonl"], 64, "--in FILE.jsonl and --out FILE.jsonl go together"),
        (["--out", "a.jsonl"], 64, "--in FILE.jsonl and --out FILE.jsonl go together"),
        (["--in", "a.jsonl", "--out", "b.jsonl", "--samples", "2"], 64, "--samples is not for --in"),
        (["--in", "no-such.jsonl", "--out", "b.jsonl"], 74, "reading no-such.jsonl failed"),
        (["--in", os.devnull, "--out", "b.jsonl"], 65, "found none"),
        (["--prompt-file", "no-such.txt"], 74, "reading no-such.txt failed"),
        (["--prompt-file", sys.executable], 65, "expected UTF-8"),
        (["--stop", ""], 64, "stop must be some text"),
        (["--samples", "0"], 64, "--samples must be at least 1, found 0"),
        (["--max-tokens", "0"], 64, "max_tokens must be 1 or more, and whole, found 0"),
        (["--batch", "-1"], 64, "--batch must be at least 1, found -1"),
        (["--batch", "x"], 64, "--batch"),
        (["--top-p", "0"], 64, "top_p must be above 0 and at most 1"),
        (["--min-p", "nan"], 64, "min_p must be from 0"),
        (["--temperature", "inf"], 64, "temperature must be 0 (greedy) or at least"),
        (["--repetition-penalty", "0"], 64, "repetition_penalty must be"),
    ],
)
def test_mistakes(arguments: list[str], code: int, told: str, run: str, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert told in refused(capsys, code, "sample", run, *arguments)


def test_a_batch_that_does_not_fit(run: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    capsys.readouterr()
    monkeypatch.setattr(devices, "available_bytes", lambda device: 4 << 20)
    assert main(["sample", run, "--max-tokens", "1", "--device", "cpu"]) == 0
    capsys.readouterr()
    told = refused(capsys, 65, "sample", run, "--samples", "200", "--batch", "200", "--device", "cpu")
    assert "has 4 MiB free" in told and "--batch of `sample`" in told


def test_a_run_draws_every_sample_with_a_seed_of_its_own(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows from the run's seed and the step alone."""
    seeds: list[int] = []
    monkeypatch.setattr(evaluating, "write_document", lambda *given, seed, **more: seeds.append(seed) or "text")
    for seed in (3, 10):
        out = str(Path(config.out).with_name(str(seed)))
        train(dataclasses.replace(config, out=out, seed=seed, steps=4, sample_every=1, eval_every=0))
    assert seeds == [4, 5, 6, 7, 11, 12, 13, 14]


def test_a_cropped_prompt_is_told(run: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """In one line on stderr, and as a warning in Python; a prompt that fills the context is not cropped."""
    few = ["--max-tokens", "2", "--device", "cpu"]
    told = "the prompt is cropped to the model's context, the last 32 tokens of up to 41\n"  # with end-of-text
    capsys.readouterr()
    assert main(["sample", run, "--prompt", "river " * 6 + "wide", "--samples", "2", *few]) == 0
    assert capsys.readouterr().err.startswith(told)
    assert main(["sample", run, "--prompt", "r" * 31, *few]) == 0
    assert "cropped" not in capsys.readouterr().err
    lines = write_lines(tmp_path / "in.jsonl", [{"prompt": letter * n} for letter, n in (("a", 50), ("b", 40), ("c", 3))])
    assert main(["sample", run, "--in", lines, "--out", str(tmp_path / "out.jsonl"), *few]) == 0
    assert "2 prompts are cropped to the model's context, the last 32 tokens of up to 51\n" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="the last 32 tokens of up to 41"):
        handgrad.load(run, device="cpu").generate("r" * 40, max_tokens=2)
