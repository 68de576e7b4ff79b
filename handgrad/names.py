"""Names that users type, and our names that they mean."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

from handgrad.errors import UsageError

T = TypeVar("T")

NEAR = 0.7  # of `difflib`: "sted" is near "seed" (0.75), "tpu" is not near "cpu" (0.67)
# Our name: other trainers' and libraries' words for it. An error suggests the first of our names that the command knows.
SYNONYMS = {
    "learning_rate": "lr max_lr peak_lr",
    "final_learning_rate_fraction": "min_lr final_lr min_lr_ratio final_lr_frac",
    "warmup_steps": "warmup warmup_iters num_warmup_steps",
    "schedule": "decay_lr scheduler lr_schedule lr_scheduler lr_scheduler_type",
    "micro_batch": "batch_size bs mini_batch_size micro_batch_size device_batch_size per_device_train_batch_size",
    "tokens_per_step": "gradient_accumulation_steps grad_accum grad_accum_steps total_batch_size",
    "batch_schedule": "batch_size_schedule rampup_batch_size step_batch_size_schedule batch_size_warmup batch_warmup",
    "packing": "pack sample_packing neat_packing padding_free",
    "epochs": "epoch num_epochs n_epochs max_epochs num_train_epochs",
    "steps": "max_iters lr_decay_iters iters iterations num_iterations max_steps max_steps_per_epoch train_steps",
    "sequence_length": "block_size context_length context context_size ctx seq_len seq_length sequence_len"
    " max_seq_len max_seq_length max_length cutoff_len n_ctx n_positions",
    "num_layers": "n_layer n_layers layers depth num_hidden_layers",
    "num_heads": "n_head n_heads heads num_attention_heads",
    "channels": "n_embd d_model hidden_size embed_dim width",
    "recompute": "gradient_checkpointing use_gradient_checkpointing activation_checkpointing"
    " enable_activation_checkpointing recomputation remat",
    "precision": "dtype mixed_precision amp bf16 fp16 fp32 tf32 fp8 half",
    "weight_decay": "wd",
    "rollouts": "num_generations group_size num_rollouts n_samples_per_prompt",
    "answer_tokens": "max_completion_length max_response_length response_length",
    "updates": "ppo_epochs num_ppo_epochs",
    "clip_ratio": "cliprange clip_range ppo_clip",
    "reward": "reward_fn reward_func reward_funcs reward_function",
    "clip_norm": "grad_clip clip max_grad_norm",
    "adam_epsilon": "eps epsilon",
    "eval_every": "eval_interval eval_steps",
    "eval_tokens": "eval_iters",
    "eval_stride": "stride sliding_window_stride",
    "log_every": "log_interval logging_steps",
    "save_every": "save_interval save_steps checkpoint_every always_save_checkpoint",
    "log_to": "wandb wandb_log wandb_project wandb_run_name report_to logger",
    "lora": "adapter peft lora_r lora_rank lora_alpha lora_target_modules lora_attn_modules",
    "async_save": "async_checkpoint async_mode background_save save_behind",
    "init_from": "finetune pretrained checkpoint base_model model_name_or_path",
    "data": "dataset data_dir data_path train_data",
    "out": "o out_dir output output_dir run_dir",
    "device": "gpu cuda cpu",
    "gpus": "num_gpus n_gpus ngpus nproc nproc_per_node num_processes devices",
    # of --lora: its settings and GEMMs
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "on": "target_modules lora_target_modules lora_attn_modules modules",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
    # of commands other than train
    "tokenizer": "vocab vocab_size vocabulary encoding",
    "batch": "batch_size bs",
    "samples": "num_samples n",
    "max_tokens": "max_new_tokens length n_predict",
    "context": "c ctx ctx_size n_ctx max_model_len",
    "without": "ablate ablation",
    "prune": "delete remove",
    "temperature": "temp",
    "prompt": "start text input message question query p",
    "prompt_file": "prompts prompts_file input_file",
    "system": "system_prompt system_message",
    "dtype": "precision bf16 fp16 fp32",
    # commands
    "prepare": "tokenize tokenise preprocess",
    "train": "finetune fine_tune sft lora fit resume pretrain base_train",
    "sample": "generate infer inference complete",
    "evaluate": "eval validate base_eval",
    "import": "convert download pull",
    "export": "push upload quantize merge merge_lora merge_and_unload save",
    "report": "compare",
    "plot": "curve curves loss graph",
    "completion": "completions autocomplete",
    "runs": "list ls status",
    "recipes": "configs presets cp",
    "gradcheck": "check_gradients test_gpt2",
    # values
    "fp32": "float32 torch.float32 f32 float single full 32",
    "bf16": "bfloat16 torch.bfloat16 bfloat",
    "fp16": "float16 torch.float16 f16 half 16",
    "fp8": "float8 f8 8",
    "cuda": "gpu nvidia",
    "mps": "metal apple",
    "kernels": "triton",
    "hf": "huggingface hugging_face transformers safetensors vllm",
    "gguf": "ollama llama.cpp llama_cpp llamacpp lm_studio lmstudio",
    "peft": "adapter adapters lora",
    "llmc": "llm.c",
    "d12": "gpt2 gpt2_small small 124m",
    "d24": "gpt2_medium medium 350m",
    "d36": "gpt2_large large 774m",
    "d48": "gpt2_xl xl 1558m 1.5b",
}

# The place where handgrad does it: other trainers' settings that are not settings of a run here.
ELSEWHERE = {
    "in a copy of the package, by a few lines: Trying an idea, in docs/architecture.md": "activation activation_function"
    " activation_fn hidden_act loss_fn loss_function criterion",
    "in a loop of your own around Training.steps: Experiments, in docs/python.md": "early_stopping patience"
    " early_stopping_patience early_stop callbacks callback on_step hooks compute_metrics",
    "when the data are prepared: `handgrad prepare --tokenizer`": "tokenizer vocab_size vocab vocabulary",
    "when the data are prepared: `handgrad prepare --validation-fraction`": "val_set_size validation_fraction val_split",
    "when the data are prepared: `handgrad prepare --chat`": "chat",
    "when the data are prepared: `handgrad prepare --text-field`": "text_field text_column dataset_text_field",
    "by the same command again: a run resumes by itself": "resume resume_from resume_from_checkpoint auto_resume"
    " auto_resume_from_checkpoints",
    "by another command: `handgrad evaluate MODEL`": "eval_only",
    "without a flag: the kernels compile before step 1, and nothing else does": "compile torch_compile",
    "by the data: `handgrad prepare --chat` trains what the assistant says, nothing else": "train_on_inputs"
    " assistant_only_loss completion_only_loss train_on_responses_only mask_prompt chat_template",
    "nowhere: weights of 8 bits are the least, --precision fp8": "load_in_4bit load_in_8bit qlora quantization",
    "nowhere: adapters have no dropout": "lora_dropout",
    "nowhere: a run samples at temperature 1 from the whole vocabulary, else its gradient is not the policy's": "top_k"
    " top_p min_p temperature repetition_penalty presence_penalty frequency_penalty",
    "nowhere: no loss holds a divergence from the start, a validation records it": "kl_coef init_kl_coef kl_loss_coef",
    "by the architecture: GPT-2 has biases, the modern network (m4 ... m48) none": "bias",
}


def nearest_name(name: str, known: Any) -> str:
    """' (did you mean X?)' with the known name that `name` is a synonym of, or else the closest one; ' (that is done
    ...)' for other trainers' settings that a run here does not have; or ''."""
    known = list(known)
    names = {plain_name(option): option for option in known}
    meant = next((names[word] for word in meanings(name) if word in names), None)
    elsewhere = next((elsewhere for elsewhere, words in ELSEWHERE.items() if plain_name(name) in words.split()), "")
    if meant is None and elsewhere and "learning_rate" in names:
        return f" (that is done {elsewhere})"
    if meant is None:
        written = {option.lstrip("-").lower().replace("-", "_"): option for option in known}  # else all flags are near
        close = difflib.get_close_matches(name.lstrip("-").lower().replace("-", "_"), written, n=1, cutoff=NEAR)
        meant = written[close[0]] if close else None
    return f" (did you mean {meant}?)" if meant else ""


def meanings(name: str) -> list[str]:
    """Our names that `name` may mean: itself, and each name that it is a synonym of."""
    plain = plain_name(name)
    return [plain, *(target for target, words in SYNONYMS.items() if plain in words.split())]


def plain_name(name: str) -> str:
    """--Batch-Size -> batch_size, cuda:0 -> cuda."""
    return name.lstrip("-").lower().replace("-", "_").partition(":")[0]


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises `UsageError`, with the nearest choice, if `value` is not one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        near = nearest_name(str(value), choices)
        raise UsageError(f"{name} must be one of {', '.join(choices)}; found {value!r}{near}")


def named_values(kind: type[T], setting: str, text: str, example: str) -> T:
    """Parses a setting's text, like the `example`, into a dataclass: name=value for a field, the bare name for a switch.
    Fields that the text leaves out keep their defaults. Raises `UsageError` for an unknown name or an invalid value."""
    known = {f.name: f.type for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in known and not equals and nearest_name(name, known) == "":
            raise UsageError(f"{setting} must be like {example!r}, found {part!r}")
        check_choice(f"a number of {setting}", name, tuple(known))
        of_field: Any = known[name]
        try:
            if (of_field is bool) == bool(equals) or name in values:
                raise ValueError
            values[name] = True if of_field is bool else of_field(value)
        except ValueError:
            raise UsageError(f"{setting} must be like {example!r}, found {part!r}") from None
    return kind(**values)


def named_text(values: Any) -> str:
    """The text of a dataclass that `named_values` parses, without the fields that have their defaults."""
    changed = {f.name: value for f in dataclasses.fields(values) if (value := getattr(values, f.name)) != f.default}
    return ",".join(name if value is True else f"{name}={value}" for name, value in changed.items())
