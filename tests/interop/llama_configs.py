"""A small model of each type of the Llama family, of odd sizes, as transformers describes it."""

import transformers

V, LENGTH = 320, 260  # of the vocabulary, of which the tokenizer has fewer; of the context
COMMON = {"vocab_size": V, "max_position_embeddings": LENGTH, "num_hidden_layers": 3, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(
        **COMMON,
        hidden_size=36,
        intermediate_size=50,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={**LLAMA3, "original_max_position_embeddings": 64},
        tie_word_embeddings=True,
    ),
    "qwen2": transformers.Qwen2Config(
        **COMMON,
        hidden_size=40,
        intermediate_size=33,
        num_attention_heads=4,
        num_key_value_heads=1,
        rope_theta=1000000.0,
        rope_scaling=YARN,
    ),
    "smollm3": transformers.SmolLM3Config(
        **(COMMON | {"num_hidden_layers": 5}),
        hidden_size=40,
        intermediate_size=51,
        num_attention_heads=4,
        num_key_value_heads=2,
        no_rope_layer_interval=2,
        pad_token_id=None,  # its row of the embedding would have no gradient
        rope_parameters={"rope_type": "default", "rope_theta": 5000000.0},
    ),
    "mistral": transformers.MistralConfig(
        **COMMON,
        hidden_size=36,
        intermediate_size=50,
        num_attention_heads=6,
        num_key_value_heads=2,
        sliding_window=17,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    ),
    "qwen3": transformers.Qwen3Config(
        **COMMON, hidden_size=24, intermediate_size=77, num_attention_heads=3, num_key_value_heads=3, head_dim=14
    ),
}
