"""A run's packing of documents into samples, and its batches."""

import bisect
import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np

from handgrad.data.batches import Batches, documents_of
from handgrad.data.mixture import MIXTURE, MixedBatches, Mixture, apart, open_data, phases_record
from handgrad.data.preferences import PairBatches, has_pairs, pair_batches, references_record
from handgrad.data.prompts import has_prompts, longest_prompt, open_prompts
from handgrad.data.shards import SPLITS, Dataset
from handgrad.errors import DataError
from handgrad.evaluation.load import Weights
from handgrad.evaluation.loss import scores_all
from handgrad.evaluation.rewards import identity
from handgrad.format import human_count
from handgrad.run.assemble import TrainedTokens
from handgrad.run.resolve import policy_of
from handgrad.run.rollouts import Rollouts
from handgrad.settings.config import AUTO, MASKED, STREAM, WHOLE, RunConfig
from handgrad.settings.objective import DISTILL, DPO, FORWARD, REVERSE, REWARD, TOKENS

MOST_STEPS = 1 << 48
DOCUMENTS = "documents"  # an identity entry that older checkpoints and chains lack
TEACHER = "teacher"  # an identity entry
PACKING_TEXT = {
    STREAM: "a row is cut from the stream of documents",
    MASKED: "a row is cut from the stream of documents, attention stays within each",
    WHOLE: "a row holds whole documents, attention stays within each",
}


def data_of(config: RunConfig, model: str, *, chat: bool = False) -> Dataset:
    """The data of a run, in the tokens of `model`. Raises the errors of `open_prompts` and `open_data`."""
    return open_prompts(config.data, model) if config.reward else open_data(config.data, model, chat=chat)


def with_answers(config: RunConfig, dataset: Dataset) -> RunConfig:
    """`config` with what it leaves open: the divergence and, of own answers, what a row leaves after the longest prompt."""
    if config.teacher_divergence == AUTO:
        config = replace(config, teacher_divergence=REVERSE if config.reward and config.teacher else FORWARD)
    if not config.reward or config.answer_tokens:
        return config
    return replace(config, answer_tokens=max(0, config.sequence_length + 1 - longest_prompt(dataset)))


def resolve_packing(packing: str, dataset: Dataset) -> str:
    """`packing`, with "auto" replaced by the packing that suits the data."""
    if packing == AUTO and dataset.codes:
        return WHOLE
    if packing == AUTO:
        return WHOLE if dataset.is_chat and not has_pairs(dataset) and not has_prompts(dataset) else STREAM
    return packing


def whole_samples(config: RunConfig, dataset: Dataset) -> RunConfig:
    """`config`, whose sample texts fill a row if they are pictures."""
    return replace(config, sample_tokens=config.sequence_length) if config.sample_tokens and dataset.codes else config


def resolve_objective(config: RunConfig, dataset: Dataset) -> str:
    """`config.objective`, with "auto" replaced by the one that suits the data, a teacher and a reward. Raises `DataError`
    if `dpo` finds no pairs, or another objective some."""
    if config.objective == DPO and not has_pairs(dataset):
        raise DataError(f"objective {DPO} needs pairs, found none in {dataset.folder}; `prepare --preferences` makes some")
    if config.objective in (TOKENS, DISTILL) and has_pairs(dataset):
        raise DataError(
            f"objective {config.objective} would train the rejected answers too, found pairs in {dataset.folder}; try"
            f" {DPO}, or prepare the chosen ones with --chat"
        )
    alone = DISTILL if config.teacher else REWARD if config.reward else TOKENS
    return config.objective if config.objective != AUTO else DPO if has_pairs(dataset) else alone


def evaluation_packing(own: str, dataset: Dataset, *, other_data: bool) -> str:
    """The packing for evaluating a model: its run's `own`, or the one that suits other data."""
    return resolve_packing(AUTO if has_pairs(dataset) or (other_data and own == STREAM) else own, dataset)


def identity_of(config: RunConfig, dataset: Dataset, teacher: Weights | None = None) -> dict[str, Any]:
    """The hashes of all that a run reads: tokens, tokenizer, documents if packing needs them, teacher; weights of sets."""
    hashes = {"data": dataset.identity, "tokenizer": dataset.tokenizer.sha256}
    references = {key: digest for key, digest in references_record(dataset).items() if key != "model"}
    hashes |= {"references": references} if references else {}
    hashes |= {"reward": identity(config.reward)} if config.reward else {}
    if teacher is not None:
        hashes |= {TEACHER: hashlib.sha256("".join(sorted(teacher.origin["sha256"].values())).encode()).hexdigest()}
    hashes |= {MIXTURE: phases_record(dataset.phases)} if isinstance(dataset, Mixture) else {}
    boundaries = json.dumps([[shard.index_sha256 for shard in dataset.splits[name]] for name in SPLITS])
    return hashes | ({DOCUMENTS: hashlib.sha256(boundaries.encode()).hexdigest()} if config.packed else {})


def training_batches(config: RunConfig, dataset: Dataset) -> Any:
    """Batches of the training split, in the run's order."""
    settings = config.sequence_length, config.seed
    if config.objective == DPO:
        return pair_batches(dataset, "train", *settings)
    if config.reward:
        return Rollouts(config, dataset, policy_of(config, 1))
    if not isinstance(dataset, Mixture):
        return Batches(dataset.splits["train"], *settings, packing=config.packing)
    sets = {one.identity: Batches(one.splits["train"], *settings, packing=config.packing) for *_, one in apart(dataset)}
    first = [config.batch.tokens_before(phase.first_step) // config.sequence_length for phase in dataset.phases]
    return MixedBatches(sets, dataset.phases, first, config.seed)


def steps_of(config: RunConfig, epochs: float) -> int:
    """The steps that read the training samples `epochs` times, rounded up. Raises the errors of `open_data`."""
    dataset = data_of(config, config.init_from)
    config = with_answers(config, dataset)
    batches = training_batches(replace(config, packing=resolve_packing(config.packing, dataset)), dataset)
    tokens = epochs * batches.samples_per_epoch * config.sequence_length
    return 1 + bisect.bisect_left(range(1, MOST_STEPS), tokens, key=config.batch.tokens_before)


def trained_tokens(batches: Batches | MixedBatches | PairBatches | Rollouts) -> TrainedTokens | None:
    """Counts trained tokens, for a run that does not train all of them; else None, and of pairs, which it counts itself."""
    return None if isinstance(batches, PairBatches) or batches.trains_all else batches.trained_tokens


def mixture_lines(config: RunConfig, dataset: Dataset) -> list[str]:
    """A header line about each of several sets: its tokens, its weight, the epochs of it in the whole run."""
    batches, lines = training_batches(config, dataset), list[str]()
    if not isinstance(batches, MixedBatches):
        return lines
    _, samples = batches.given(config.batch.tokens_before(config.steps) // config.sequence_length)
    for name, weight, one in apart(dataset):
        epochs, tokens = samples[one.identity] / batches.sets[one.identity].samples_per_epoch, one.tokens("train")
        share = f"{name}: {human_count(tokens)} training tokens, {float(weight):.3g} of the samples"
        lines.append(f"           {share}, {epochs:{'.1f' if epochs >= 0.1 else '.1g'}} epochs of it in all")
    return lines


def packing_lines(config: RunConfig, dataset: Dataset, origin: dict[str, Any] | None = None) -> list[str]:
    """The header line about packed documents, or about rows with untrained tokens. `origin`: of the first weights."""
    if config.objective == DPO:
        pairs = f"{len(dataset.splits['train'][0].document_starts) // 2} pairs, each answer in a row of its own"
        model = references_record(dataset)["model"]
        differ = origin is not None and origin.get("sha256") != model.get("sha256")
        note = ", NOT the weights that this run starts from: its first loss is not ln 2" if differ else ""
        return [f"objective  {DPO}: {pairs}; beta {config.dpo_beta:g}; references of {model.get('source')}{note}"]
    if config.reward:
        prompts = config.tokens_per_step // config.sequence_length // config.rollouts
        more = f", for {config.updates} updates" if config.updates > 1 else ""
        answers = f"{prompts} prompts x {config.rollouts} answers of up to {config.answer_tokens} tokens"
        answers += f", or up to {config.answer_stop!r}," if config.answer_stop else ""
        loss = REWARD if config.objective == REWARD else f"{DISTILL} on own answers, {REWARD}"
        return [f"objective  {loss} {config.reward}: {answers} a sampling{more}"]
    if scores_all(dataset, config.packing):
        return [f"packing    {config.packing}: {PACKING_TEXT[config.packing]}"] if config.packed else []
    in_order = Batches(dataset.splits["train"], config.sequence_length, 0, shuffle=False, packing=config.packing)
    samples = in_order.samples_per_epoch
    targets = samples * config.sequence_length
    parts = [PACKING_TEXT[config.packing], f"{in_order.scored_tokens(samples) / targets:.1%} of the targets are trained"]
    if config.packing == WHOLE:
        parts.insert(-1, f"{max(0.0, 1 - dataset.tokens('train') / targets):.1%} of the rows is padding")
    cut = cut_documents(dataset, config.sequence_length) if config.packing == WHOLE else []
    return [f"packing    {config.packing}: {', '.join(parts)}", *cut]


def document_lengths(dataset: Dataset, split: str) -> np.ndarray:
    """Tokens per document, int64."""
    return np.concatenate([documents_of(shard.document_starts, shard.token_count)[1] for shard in dataset.splits[split]])


def row_that_holds(tokens: int) -> int:
    """The shortest row, a power of two, that holds a document of `tokens` tokens. The last token is only a target."""
    return 1 << max(0, int(tokens) - 2).bit_length()


def cut_documents(dataset: Dataset, sequence_length: int) -> list[str]:
    """The header line about training documents longer than a row and its last target; none if all fit."""
    lengths = document_lengths(dataset, "train")
    if not (cut := int((lengths > sequence_length + 1).sum())):
        return []
    longest = int(lengths.max())
    remedy = f"--sequence-length {row_that_holds(longest)} takes all whole, if the weights have as many positions"
    return [
        f"cut        {cut} of {len(lengths)} documents are longer than a row, the longest has {longest} tokens; {remedy}"
    ]
