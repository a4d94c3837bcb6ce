"""A model so small that its costs can be counted by hand."""

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 32,
}
