"""Mutants of the core, and the share that the tests kill: `python -m tests.mutants [--module PART] [--record FILE]`.

A mutant is a small mistake: an exact text of a module and what it becomes. Each is planted in a copy of the tree, where the
tests that hold the module's promises must fail. One that survives is a promise without a test, unless nothing that can be
seen depends on it: then the table says why, and it does not count. Some seconds a mutant; no part of CI.
"""

import argparse
import importlib
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TRITON_INTERPRET": "1"}  # as tests/conftest.py has it

import pytest
import torch

from benchmarks.record import ROOT, write_record

# Imported once; a fork for each mutant then has them, and imports the copy of the package and its tests anew.
PRELOADED = ("torch._dynamo", "transformers", "hypothesis.strategies", "tokenizers", "tiktoken", "pyarrow.parquet")
FORKS = multiprocessing.get_context("fork")

LIMIT_SECONDS = 600.0  # a mutant whose tests hang until then counts as killed
KILLED, SURVIVED, EQUIVALENT = OUTCOMES = "killed", "survived", "equivalent"
FAILED = 1  # pytest's exit code when a test fails; 2 and above: it could not run them

# "= module of handgrad: the tests, below tests/, that should kill its mutants", then "source ==> replacement" and, of an
# equivalent one, "## the reason". \n is the end of a line.
TABLE = r"""
= run/resolve.py: test_training.py
AdamW(config.beta1, ==> AdamW(0.9,
config.beta1, config.beta2, ==> config.beta1, 0.95,
config.adam_epsilon, ==> 1e-8,
config.weight_decay, config.seed) ==> 0.1, config.seed)
config.weight_decay, config.seed) ==> config.weight_decay, 0)
Guards(config.clip_norm, ==> Guards(1.0,
= optimizers/adamw.py: test_training.py
beta1=self.beta1 ==> beta1=0.9
beta2=self.beta2 ==> beta2=0.95
epsilon=self.epsilon ==> epsilon=1e-8
self.weight_decay if part.kind ==> 0.1 if part.kind
if part.kind else 0.0 ==> if part.kind else self.weight_decay
row.group != "vector" ==> row.group == "matrix"
seed=self.seed ==> seed=0
first_element=part.first_element ==> first_element=0
= training/step.py: test_training.py test_freezing.py test_checkpoints.py -k "not test_checkpoints or fp16"
controls = [step + 1, ==> controls = [step,
self.losses.limit(guards.loss_z) ==> self.losses.limit(guards.loss_z + 1)
self.norms.limit(guards.norm_z) ==> self.norms.limit(guards.loss_z)
if code == UPDATE: ==> if code != LOSS_OUTLIER:
self.norms.add(norm) ==> self.norms.add(loss)
state.gradients.zero_() ==> pass
state.sum_of_losses.zero_() ==> pass
state.loss_scale[:1], **options ==> state.loss_scale[1:2], **options
clip_norm=design.guards.clip_norm ==> clip_norm=0.0
dynamic_loss_scale=design.guards.loss_scaling ==> dynamic_loss_scale=False
"recompute": design.recompute ==> "recompute": 0
[*frozen, *norms] ==> [*norms]
rate, skipped = self.design.schedule.rate(step) ==> rate, skipped = self.design.schedule.rate(step + 1)
IN_FLIGHT = 2 ==> IN_FLIGHT = 1
= training/schedule.py: test_training.py -k schedules
max(1, self.steps - self.warmup_steps) ==> max(1, self.steps)
WSD_DECAY_FRACTION = 0.2 ==> WSD_DECAY_FRACTION = 0.25
1 - math.sqrt(ratio) ==> 1 - ratio
= training/spikes.py: test_training.py
self.statistics()\n        if deviation ==> SpikeWindow([*self.values, value]).statistics()\n        if deviation
return mean + z * deviation ==> return mean + (z + 1) * deviation
WINDOW = 128 ==> WINDOW = 64
not z or len(self.values) < WINDOW ==> len(self.values) < WINDOW
for x in self.values) / WINDOW) ==> for x in self.values) / (WINDOW - 1))
math.copysign(math.inf, value - mean) ==> math.inf
if math.isfinite(value):\n            self ==> if True:\n            self
= training/feed.py: test_training.py test_dropout.py
np.argsort(keys, kind="stable") ==> np.argsort(-keys.astype(int), kind="stable")
np.argsort(keys, kind="stable") ==> len(keys) - 1 - np.argsort(keys[::-1], kind="stable")
flat.max() < 1 << 16 ==> flat.max() < 1 << 17
torch.arange(first_sample, first_sample + len(numbers), ==> torch.arange(0, len(numbers),
= training/state.py: test_training.py test_runs.py -k "not test_runs or non_finite or without_master"
state, part.flat.start)) ==> state, 0))
[scale / self.design.batch.tokens, scale, ==> [scale / self.design.batch.samples, scale,
initialize(table, design.seed, ==> initialize(table, 0,
start + block * BLOCK_ELEMENTS ==> start + (block + 1) * BLOCK_ELEMENTS
= models/gpt2.py: test_model.py test_sampling.py
act.residual_mid, w.ln2_weight, w.ln2_bias, *fc ==> act.residual_mid, w.ln1_weight, w.ln2_bias, *fc
g.proj_bias, scratch=s) ==> g.fcproj_bias, scratch=s)
g.blocks[layer].fcproj_bias ==> g.blocks[layer].proj_bias
if recompute >= 2:\n        ops.layernorm_forward(act.ln1 ==> if recompute >= 3:\n        ops.layernorm_forward(act.ln1
if recompute >= 2:\n        ops.layernorm_forward(act.ln2 ==> if recompute >= 3:\n        ops.layernorm_forward(act.ln2
if recompute >= 1: ==> if recompute >= 2:
remade_from=2, fp8=Fp8("mlp", redone_from=1) ==> remade_from=1, fp8=Fp8("mlp", redone_from=1)
qkv: Tensor = activation("N 3C", lives=kept(ATTENTION)) ==> qkv: Tensor = activation("N 3C", lives=at_head)
d.dresidual.zero_() ==> pass
Init("normal", 0.02, residual=True) ==> Init("normal", 0.02)
slice(start, min(start + chunk, N)) ==> slice(start, min(start + chunk, N - 1))
ops.embedding_decode(x, b.tokens, b.positions ==> ops.embedding_decode(x, b.tokens, b.places
zip(w.blocks[:-1], caches ==> zip(w.blocks[:-2], caches
caches[-1]() ==> caches[0]()
= ops/reference/attention.py: test_operations.py -k attention
.mul_(1.0 / math.sqrt( ==> .mul_(2.0 / math.sqrt(
triu_(1) ==> triu_(2)
0.0, True)\n        y ==> 0.0, False)\n        y
(dy[b] * y[b]).sum ==> (dy[b] * v[b]).sum
torch.matmul(dscores.transpose(-1, -2), q[b]).mul_(scale) ==> torch.matmul(dscores.transpose(-1, -2), q[b])
= ops/reference/classifier.py: test_operations.py test_model.py -k "classifier or gradients or logits"
logits_inout[:, vocab_size:] ==> logits_inout[:, vocab_size + 1 :]
torch.mul(p, scale ==> torch.mul(p, scale * scale
= ops/reference/embedding.py: test_operations.py -k embedding
dwte_acc.index_add_( ==> dwte_acc.index_copy_(
accumulate=True ==> accumulate=False
= ops/reference/gelu.py: test_operations.py test_model.py -k "gelu or gradients"
residual_forward(out, residual, out) ==> residual_forward(out, out, out)
= ops/reference/layernorm.py: test_operations.py test_model.py -k "layernorm or gradients"
LAYERNORM_EPSILON = 1e-5 ==> LAYERNORM_EPSILON = 1e-6
dresidual_inout.add_(dinp) ==> dresidual_inout.copy_(dinp)
bias_backward(dbias_below_acc, dresidual_inout) ==> bias_backward(dbias_below_acc, dinp)
= ops/reference/linear.py: test_operations.py -k "linear or products"
slice(row, row + step) ==> slice(row, row + step - 1)
= ops/reference/optimizer.py: test_operations.py test_training.py
if clip_norm and norm > clip_norm else ==> if clip_norm else
weight, int(step), seed, first_element) ==> weight, 1, seed, first_element)
weight, int(step), seed, first_element) ==> weight, int(step), 0, first_element)
weight, int(step), seed, first_element) ==> weight, int(step), seed, 0)
.item()) / scale ==> .item())
clip / scale, code ==> clip, code
loss > limits ==> loss >= limits
good_steps == LOSS ==> good_steps > LOSS
one / gradient_scale ==> one * gradient_scale
& 0xFFFF ==> & 0x7FFF
(bits & 0x7F800000) != 0x7F800000 ==> (bits & 0x7F800000) != 0
functools.reduce(operator.add, sum_of_losses.tolist()) ==> math.fsum(sum_of_losses.tolist())
= ops/reference/reduction.py: kernels/test_reduction.py
rows.chunk(2) ==> rows.split([1, rows.shape[0] - 1])
first.bfloat16(), second.bfloat16() ==> first.bfloat16(), second
* 2 + 1 ==> * 2
= ops/reference/decode.py: test_choosing.py test_operations.py test_decode_operations.py test_sampling.py
likelier = shares.cumsum(1) - shares ==> likelier = shares.cumsum(1)
likelier >= max(1 ==> likelier > max(1
scores < math.log(min_p) ==> scores <= math.log(min_p)
topk(top_k).values[:, -1:] ==> topk(top_k).values[:, :1]
scores / repetition_penalty, scores * repetition_penalty ==> scores / repetition_penalty, scores / repetition_penalty
device=qkv.device) > positions ==> device=qkv.device) >= positions
(bits.float() + 0.5) ==> (bits.float() + 0.75)
(seeds >> 32) & BITS32 ==> (seeds >> 31) & BITS32
= layout.py: test_buckets.py test_freezing.py distributed/test_same_bits.py -k "not same_bits or matrices or shared"
lanes_per_rank.bit_length() ==> lanes_per_rank.bit_length() - 1
return self.rank if self.zero else 0 ==> return self.rank
self.before[rank * lanes : (rank + 1) * lanes] ==> self.before[: (rank + 1) * lanes]
max(self.elements, ranks * max(self.shares(ranks))) ==> self.elements
max(buckets[-1].local(rank, ranks).stop for ==> min(buckets[-1].local(rank, ranks).stop for
RING <= block < len(buckets) - 2 ==> RING <= block < len(buckets) - 1
places[buckets[index - RING].name] ==> places[buckets[index - RING + 1].name]
partial = place * most ==> partial = (place + 1) * most - most // 2
first + row.elements if row.whole else end ==> end
last.frozen, last.shape, None) ==> part.frozen, last.shape, None)
(last.flat.stop, last.local.stop) == ==> (last.flat.stop, part.local.start) ==  ## neighbours are so in their shard as well
RING = 3 ==> RING = 2
= parallel/gradient_sync.py: distributed/test_same_bits.py -k "matrices or shared or 2-1 or 2-0"
while lane >> level & 1: ==> while lane >> level & 2:
stack[level + 1].copy_(stack[0]) ==> stack[1].copy_(stack[0])
stack[:: level + 1][:2], rounded=self.sharding.rounded ==> stack[:: level + 1][:2], rounded=False
self.sharding.lanes_per_rank - 1, bucket.flat ==> 0, bucket.flat
received.view(ranks, -1), rounded=self.sharding.rounded ==> received.view(ranks, -1), rounded=False
self.buckets.index(bucket) - RING + 1 ==> self.buckets.index(bucket) - RING
sent.copy_(self.gradients[self.places[name]]) ==> pass
if self.sharding.shards > 1: ==> if False:
owned = self.sum_received(bucket) ==> owned = self.gradients[bucket.owned(self.ranks.rank, self.ranks.size)]
if self.sharding.shards == 1: ==> if True:
= parallel/stragglers.py: distributed/test_rank_faults.py -k "noise or straggler"
SLOW_FACTOR = 1.1 ==> SLOW_FACTOR = 1.25
SLOW_FACTOR = 1.1 ==> SLOW_FACTOR = 1.05
SLOW_SECONDS = 0.005 ==> SLOW_SECONDS = 0.006
statistics.median_low(fastest) * SLOW_FACTOR ==> statistics.median_low(fastest)
= data/batches.py: data/test_batches.py
mix(self.seed, WINDOW_ORDER, epoch, shard) ==> mix(0, WINDOW_ORDER, epoch, shard)
mix(self.seed, SHARD_ORDER, epoch) ==> mix(0, SHARD_ORDER, epoch)
mix(self.seed, OFFSET, epoch, shard) ==> mix(0, OFFSET, epoch, shard)
mix(self.seed, WINDOW_ORDER, epoch, shard) ==> mix(self.seed, WINDOW_ORDER, shard)
mix(self.seed, WINDOW_ORDER, epoch, shard) ==> mix(self.seed, WINDOW_ORDER, epoch)
side="right" ==> side="left"
% (slack + 1) ==> % max(1, slack)
sequence_length, 0, shuffle=False) if ==> sequence_length, 0) if
= data/tokenizer.py: data/test_tokenizer.py
|ll|ve|re)| ==> |ll|ve)|
| ?\p{N}++| ==> | ?\p{N}{1,3}|
= evaluation/loss.py: test_evaluation.py distributed/test_same_bits.py -k "test_evaluation or fp32-2-1"
loss / math.log(2) * dataset ==> loss * dataset
counted = min(batch, samples - first) ==> counted = batch
samples = min(samples, batches.samples_per_epoch) ==> pass
return total / (samples * act.tokens.shape[1]) ==> return total / samples
starts[ranks.rank :: ranks.size] ==> starts[:: ranks.size]
everyone[index % ranks.size][index // ranks.size] ==> everyone[0][index // ranks.size]
max(1, eval_tokens // length) if ==> max(1, eval_tokens // length - 1) if
tokens = min(samples, batches.samples_per_epoch) ==> tokens = samples
loss / floor - 1 ==> floor / loss - 1
= run/loop.py: test_evaluation.py test_sample_command.py
self.config.eval_tokens // self.config.sequence_length) ==> self.config.eval_tokens // self.config.sequence_length - 1)
self.training.await_weights()\n        state, samples ==> state, samples
self.training.await_weights()\n        model = ==> model =
seed=self.config.seed + self.completed ==> seed=self.config.seed
= generation/generate.py: test_sampling.py
slot.position = len(context) - 1 ==> slot.position = len(context)
self.longest // 2) ==> self.longest // 4)
len(text.prompt) + len(text.tokens)\n ==> len(text.prompt)\n
seen[self.end_of_text] = False ==> pass
seen[[*text.prompt, *text.tokens]] = True ==> seen[[*text.prompt]] = True
len(text.tokens) == text.max_tokens ==> len(text.tokens) > text.max_tokens
buf.places.add_(1) ==> buf.places.add_(2)
buf.positions.add_(buf.active) ==> buf.positions.add_(1)
self.arrivals.reverse() ==> pass
= generation/text.py: test_text_streams.py test_sample_command.py
self.decoded += len(ids) ==> self.decoded = len(ids)
min(ends)[1] ==> max(ends)[1]
kept = 0 if text.stopped else max( ==> kept = max(
[tokenizer.end_of_text, *tokenizer ==> [*tokenizer
= checkpoint.py: test_checkpoints.py test_best_checkpoint.py
os.fsync(file.fileno()) ==> pass
partial.rename(final)\n        sync_folder(checkpoints) ==> partial.rename(final)
sync_folder(partial)\n ==> pass\n
if found != entry.get("sha256"): ==> if False:
if digest != _content_sha256(manifest): ==> if False:
folders[len(later) :][keep:] ==> folders[len(later) :][keep + 1 :]
_step_of(folder) > newest_step ==> _step_of(folder) >= newest_step
if tensor.shape != shape: ==> if False:
if names != set(receivers): ==> if not names >= set(receivers):
loss, step = min(finite) ==> loss, step = max(finite)
record.get("step") in saved ==> True
b" " * (-len(text) % 8) ==> b""
return hashlib.sha256(json.dumps(content, sort_keys=True) ==> return hashlib.sha256(json.dumps(content)
= run/saving.py: test_checkpoints.py -k fp16
set_loss_scale(*manifest["loss_scale"]) ==> set_loss_scale(2.0**16, 0.0)
SpikeWindow(manifest["loss_window"]), ==> SpikeWindow(),
= interop/llmc_state.py: interop/test_llmc.py interop/test_llmc_faults.py
2.0**-7 * master.abs() ==> 2.0**-1 * master.abs()
= ops/cuda/decode.py: kernels/test_decode_kernels.py
mask = (n < position)[:, None] ==> mask = (n < position - 1)[:, None]
tl.where(n < position, tl.sum( ==> tl.where(n < position - 1, tl.sum(
earlier = start + n < position ==> earlier = start + n < position - 1
range(KEYS, position, KEYS) ==> range(position, position, KEYS)
= ops/cuda/choosing.py: kernels/test_decode_kernels.py
scores * penalty) ==> tl.div_rn(scores, penalty))
= ops/cuda/optimizer.py: kernels/test_memory_kernels.py
norm > CLIP_NORM, ==> norm > 0,
loss > tl.load(controls + LOSS_LIMIT) ==> loss > 1 + tl.load(controls + LOSS_LIMIT)
first_element + place, step ==> place, step
step.to(tl.int32), seed) ==> 1, seed)
step.to(tl.int32), seed) ==> step.to(tl.int32), 0)
= fp8/scaling.py: test_fp8_training.py
LARGEST_EXPONENT[E5M2] - math.ceil ==> LARGEST_EXPONENT[E5M2] + 1 - math.ceil
= devices.py: test_model.py
"H200": 989.4e12 ==> "H200": 1978.8e12
"""


@dataclass(frozen=True)
class Mutant:
    source: str
    replacement: str
    equivalent: str  # the reason, if it is


@dataclass(frozen=True)
class Target:
    """A module, the tests of its promises (arguments of pytest), and its mutants."""

    module: str
    tests: list[str]
    mutants: list[Mutant]


def read_table(table: str) -> list[Target]:
    targets: list[Target] = []
    for line in filter(None, table.splitlines()):
        if line.startswith("= "):
            module, _, tests = line.removeprefix("= ").partition(": ")
            words = [f"tests/{word}" if ".py" in word else word for word in shlex.split(tests)]
            targets.append(Target(module, words, []))
        else:
            change, _, reason = line.partition("  ## ")
            source, _, replacement = (part.strip().replace(r"\n", "\n") for part in change.partition("==>"))
            targets[-1].mutants.append(Mutant(source, replacement, reason))
    return targets


def copy_tree(folder: Path) -> None:
    """Copies the files that git knows, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    # Some tests ask git for the tree's files.
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)


def run_tests(folder: Path, tests: list[str]) -> None:
    """Runs the tests of the copy until the first that fails; a process of its own, whose exit code is pytest's."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("handgrad", "tests", "benchmarks")]:
        del sys.modules[name]
    with Path("output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


def tests_pass(folder: Path, tests: list[str]) -> bool:
    process = FORKS.Process(target=run_tests, args=(folder, tests))
    process.start()
    process.join(LIMIT_SECONDS)
    process.kill()
    process.join()
    if process.exitcode not in (0, FAILED, -signal.SIGKILL):
        raise SystemExit(f"pytest could not run {shlex.join(tests)}:\n{(folder / 'output').read_text()[-3000:]}")
    return process.exitcode == 0


def plant(path: Path, text: str) -> None:
    """Writes a module; what Python compiled of it before goes, since it may be as old and as long as the new one."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(text, encoding="utf-8")


def outcomes(target: Target, folder: Path) -> list[dict[str, str]]:
    """What became of each mutant of a module."""
    path, found = folder / "handgrad" / target.module, []
    original = path.read_text(encoding="utf-8")
    if not tests_pass(folder, target.tests):
        raise SystemExit(f"the tests of {target.module} fail without a mutant: {shlex.join(target.tests)}")
    for mutant in target.mutants:
        outcome = EQUIVALENT
        if not mutant.equivalent:
            plant(path, original.replace(mutant.source, mutant.replacement))
            outcome = SURVIVED if tests_pass(folder, target.tests) else KILLED
            plant(path, original)
        entry = {"source": mutant.source, "replacement": mutant.replacement, "outcome": outcome}
        found.append(entry | ({"reason": mutant.equivalent} if mutant.equivalent else {}))
        print(f"{outcome:<10} {target.module}: {mutant.source!r} -> {mutant.replacement!r}", flush=True)
    return found


def check(targets: list[Target]) -> None:
    """Refuses a mutant whose source text is not in its module exactly once."""
    for target in targets:
        text = (ROOT / "handgrad" / target.module).read_text(encoding="utf-8")
        for mutant in target.mutants:
            count = text.count(mutant.source)
            if count != 1 or mutant.source == mutant.replacement:
                raise SystemExit(
                    f"expected a text that stands once in handgrad/{target.module} and changes, found it {count} times:"
                    f" {mutant.source!r} -> {mutant.replacement!r}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", metavar="PART", default="", help="only modules whose path contains this")
    parser.add_argument("--record", metavar="FILE", help="write the outcomes as JSON, with machine, versions and commit")
    arguments = parser.parse_args()
    targets = read_table(TABLE)
    check(targets)
    for name in PRELOADED:
        importlib.import_module(name)
    found: dict[str, list[dict[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for target in targets:
            if arguments.module in target.module:
                found[target.module] = outcomes(target, Path(folder))
    entries = {**found, "total": [entry for entries in found.values() for entry in entries]}
    counts = {
        module: {outcome: sum(entry["outcome"] == outcome for entry in each) for outcome in OUTCOMES}
        for module, each in entries.items()
    }
    print(f"{'module':<32}{''.join(f'{outcome:>12}' for outcome in OUTCOMES)}")
    for module, count in counts.items():
        print(f"{module:<32}{''.join(f'{number:>12}' for number in count.values())}")
    if arguments.record:
        write_record(arguments.record, torch.device("cpu"), counts=counts, mutants=found)
    sys.exit(bool(counts["total"][SURVIVED]))


if __name__ == "__main__":
    main()
