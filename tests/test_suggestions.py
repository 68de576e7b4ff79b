"""A wrong word gets the right one: names of other trainers, values of other libraries, in flags, TOML keys and keywords."""

from dataclasses import fields
from pathlib import Path

import pytest

import handgrad
from handgrad.cli import main
from handgrad.commands.arguments import COMMANDS, parse
from handgrad.commands.parser import Parser
from handgrad.errors import UsageError
from handgrad.names import SYNONYMS, nearest_name, plain_name
from handgrad.networks import NETWORKS
from handgrad.networks.lora import LoraShape, check_lora, products
from handgrad.settings.config import RunConfig
from tests.test_commands import refused

TRAIN = {
    "lr": "learning_rate",
    "min_lr": "final_learning_rate_fraction",
    "batch_size": "micro_batch",
    "block_size": "sequence_length",
    "context_length": "sequence_length",
    "num_iterations": "steps",
    "max_iters": "steps",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "channels",
    "gradient_accumulation_steps": "tokens_per_step",
    "dtype": "precision",
    "eval_interval": "eval_every",
    "grad_clip": "clip_norm",
    "out_dir": "out",
    "max_length": "sequence_length",
    "gradient_checkpointing": "recompute",
    "stpes": "steps",
}


@pytest.mark.parametrize(("word", "meant"), TRAIN.items())
def test_words_of_other_trainers(word: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As a flag, written three ways, as a key of a recipe, and as a keyword in Python."""
    dashed, flag = word.replace("_", "-"), "--" + meant.replace("_", "-")
    for line in ([f"--{dashed}", "8"], [f"--{word}=8"], [f"-{dashed}", "8"]):
        assert f"(did you mean {flag}?)" in refused(capsys, 64, "train", "tiny", *line)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"{word} = 8\n")
    assert f"(did you mean {meant}?)" in refused(capsys, 64, "train", "--config", str(recipe))
    with pytest.raises(UsageError, match=rf"unknown setting '{word}' \(did you mean {meant}\?\)"):
        handgrad.train("tiny", **{word: 8})


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train tiny --precision float16", "fp16"),
        ("train tiny --precision bfloat16", "bf16"),
        ("train tiny --precision torch.float32", "fp32"),
        ("train tiny --precision half", "fp16"),
        ("train tiny --precision BF16", "bf16"),
        ("train tiny --device gpu", "cuda"),
        ("train tiny --device cuda:0", "cuda"),
        ("train tiny --schedule cosin", "cosine"),
        ("train tiny --nproc-per-node 8", "--gpus"),
        ("train tiny --num-train-epochs 3", "--epochs"),
        ("train gpt2", "d12"),
        ("train --model gpt2-xl", "d48"),
        ("evaluate run --precision bfloat16", "bf16"),
        ("evaluate run --batch-size 4", "--micro-batch"),
        ("sample run --device gpu", "cuda"),
        ("sample run --num-samples 3", "--samples"),
        ("sample run --max-new-tokens 3", "--max-tokens"),
        ("sample run --batch-size 3", "--batch"),
        ("export run dir --to hf --dtype bfloat16", "bf16"),
        ("export run dir --to hf --precision bf16", "--dtype"),
        ("prepare text.txt --out-dir x", "--out"),
        ("export run dir --to ollama", "gguf"),
        ("export run dir --to llama.cpp", "gguf"),
        ("export run dir --to transformers", "hf"),
        ("export run dir --to lora", "peft"),
        ("export run dir --to llm.c", "llmc"),
        ("merge run", "export"),
        ("lora run", "train"),
        ("prepare text.txt --vocab-size 512", "--tokenizer"),
    ],
)
def test_words_of_other_libraries(line: str, meant: str, capsys: pytest.CaptureFixture) -> None:
    assert f"(did you mean {meant}?)" in refused(capsys, 64, *line.split())


def test_all_unknown_flags_are_answered_at_once(capsys: pytest.CaptureFixture) -> None:
    line = refused(
        capsys, 64, *["train", "tiny", "--n_layer=4", "--device=cpu", "--max_iters", "20", "--n_layer=5", "--zzz"]
    )
    told = "'--n_layer' (did you mean --num-layers?), '--max_iters' (did you mean --steps?), '--zzz'"
    assert line.startswith(f"handgrad: unknown arguments {told};")


def test_a_setting_may_be_written_as_in_python() -> None:
    parsed = parse("train", ["tiny", "--tokens_per_step=512", "--keep_best", "--data", "a_b", "--out=c_d"]).run_config
    assert (parsed.tokens_per_step, parsed.keep_best, parsed.data, parsed.out) == (512, True, "a_b", "c_d")
    assert parse("sample", ["run", "--max_tokens", "3"]).max_tokens == 3


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["train", "tiny", "shards/mine"], "--data DIR"),
        (["sample", "run", "Once upon"], "one argument too many: 'Once upon'; give a text as --prompt TEXT"),
        (["chat", "run", "Hello"], "one argument too many: 'Hello'; give a message as --prompt TEXT"),
        (["serve", "run", "Hello"], "one argument too many: 'Hello'; its page and its API take the messages"),
        (["evaluate", "run", "another"], "one MODEL at a time; `handgrad report RUN RUN` compares runs"),
        (["train", "--init-from", "resume"], "found 'resume': a run resumes by itself, by the same command again"),
        (["train", "tiny", "--init_from=scratch"], "found 'scratch': a run starts from nothing without it"),
        (["train", "config/train_shakespeare_char.py"], "recipes are TOML, not programs (did you mean shakespeare-char?)"),
    ],
)
def test_a_word_in_the_wrong_place(line: list[str], told: str, capsys: pytest.CaptureFixture) -> None:
    assert told in refused(capsys, 64, *line)


@pytest.mark.parametrize("word", ["--prompt", "-p", "--message", "--text", "--prompt_file", "--in"])
def test_a_message_as_a_flag(word: str, capsys: pytest.CaptureFixture) -> None:
    """`chat` takes one, or a file through a pipe; the page of `serve` takes them."""
    way = "through a pipe: handgrad chat MODEL < FILE" if word in ("--prompt_file", "--in") else "did you mean --prompt?"
    for line in ([word, "Hello"], [f"{word}=Hello"]):
        assert "its page and its API take the messages" in refused(capsys, 64, "serve", "run", *line)
        if word != "--prompt":
            assert way in refused(capsys, 64, "chat", "run", *line)


@pytest.mark.parametrize("word", ["--message", "--text", "-p", "--question", "--prompts"])
def test_a_message_continued_by_sample(word: str, capsys: pytest.CaptureFixture) -> None:
    meant = "--prompt-file" if word == "--prompts" else "--prompt"
    assert f"(did you mean {meant}?)" in refused(capsys, 64, "sample", "run", word, "Hello")


def test_a_conversation_is_another_command_than_sample(capsys: pytest.CaptureFixture) -> None:
    for line in (["--system", "Be brief."], ["--system-prompt", "Be brief."], ["--chat"]):
        assert "(`handgrad chat MODEL --system TEXT` talks)" in refused(capsys, 64, "sample", "run", *line)


@pytest.mark.parametrize("command", ["sample", "chat", "serve", "evaluate"])
def test_a_removed_flag_says_what_to_do(command: str, capsys: pytest.CaptureFixture) -> None:
    line = refused(capsys, 64, command, "run", "--fp8-weights")
    assert "unknown argument '--fp8-weights' (removed: weights are read in --precision; leave it out)" in line


def test_the_first_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The commands that lead to prepared text, or the one that trains on it if there is some."""
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, 64, "train")
    assert (
        "nothing is prepared in shards yet; `handgrad prepare MY_TEXT.txt --out shards/mine`, then `handgrad train" in line
    )
    (tmp_path / "text.txt").write_text("a few words\n" * 50)
    assert main(["prepare", "text.txt", "--out", "shards/my text", "--workers", "1"]) == 0
    capsys.readouterr()
    assert "say what to train: `handgrad train --data 'shards/my text'` takes" in refused(capsys, 64, "train")
    assert "make one: `handgrad prepare MY_TEXT.txt --out nowhere`" in refused(
        capsys, 65, "train", "tiny", "--data", "nowhere"
    )


@pytest.mark.parametrize(
    ("text", "meant"), [("r=8", "rank"), ("rank=8,target_modules=q", "on"), ("on=q+gate_proj", "gate"), ("on=q_proj", "q")]
)
def test_adapters_in_the_words_of_peft(text: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"\(did you mean {meant}\?\)"):
        check_lora(text, RunConfig(architecture="llama").shape(1), "weights", [])


def test_words_in_python() -> None:
    for given, meant in (({"device": "cuda:1"}, "cuda"), ({"precision": "float32"}, "fp32")):
        with pytest.raises(UsageError, match=rf"\(did you mean {meant}\?\)"):
            handgrad.load("no-such-run", **given)
    with pytest.raises(UsageError, match=r"\(did you mean bf16\?\)"):
        handgrad.preset("tiny", precision="bfloat16")


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("activation", "Trying an idea"),
        ("loss_fn", "Trying an idea"),
        ("early_stopping", "Experiments"),
        ("on_step", "Training.steps"),
        ("vocab_size", "handgrad prepare --tokenizer"),
        ("resume", "by the same command again"),
        ("eval_only", "handgrad evaluate MODEL"),
        ("train_on_inputs", "`handgrad prepare --chat` trains what the assistant says"),
        ("lora_dropout", "adapters have no dropout"),
        ("load_in_4bit", "--precision fp8"),
        ("compile", "without a flag"),
        ("bias", "by the architecture"),
        ("val_set_size", "--validation-fraction"),
    ],
)
def test_what_is_no_setting_has_its_place(word: str, place: str, capsys: pytest.CaptureFixture) -> None:
    """And no unlike name is suggested instead."""
    for line in (refused(capsys, 64, "train", "tiny", f"--{word.replace('_', '-')}", "8"), mistake(word)):
        assert place in line and "did you mean" not in line
    root = Path(handgrad.__file__).parents[1]
    headings = {"Trying an idea": "architecture.md", "Experiments": "python.md"}
    assert all(f"\n## {name}\n" in (root / "docs" / page).read_text() for name, page in headings.items())


def test_a_setting_that_holds_a_name_says_which() -> None:
    with pytest.raises(UsageError, match=r"schedule must be one of cosine, linear, .*, found <function"):
        handgrad.preset("tiny", schedule=lambda step: 1e-3)  # type: ignore[arg-type]


def mistake(word: str) -> str:
    with pytest.raises(UsageError) as raised:
        handgrad.preset("tiny", **{word: 8})
    return str(raised.value)


def test_every_synonym_leads_to_a_name() -> None:
    """The table names commands, flags, values and presets that exist; ours suggest themselves however they are written."""
    known = set(COMMANDS)
    for _, add_arguments in COMMANDS.values():
        parser = Parser("x")
        add_arguments(parser)
        for action in parser._actions:
            known |= {plain_name(word) for word in action.option_strings}
            known |= {str(choice) for choice in action.choices or ()} | set(str(action.metavar).split("|"))
    from handgrad.settings.presets import MODELS

    in_lora = {field.name for field in fields(LoraShape)}
    in_lora |= {name for network in NETWORKS for name in products(RunConfig(architecture=network).shape(1))}
    assert set(SYNONYMS) <= known | set(MODELS) | in_lora
    assert nearest_name("--Learning_Rate", ["--learning-rate", "--zero"]) == " (did you mean --learning-rate?)"
    assert nearest_name("zzz", ["--learning-rate"]) == ""
    assert nearest_name("finetune", COMMANDS) == " (did you mean train?)"
