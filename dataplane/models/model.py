"""What engines know of any model."""

from typing import Protocol

from torch import Tensor, nn

from octavo.dataplane.models.layers import ForwardState


class ModelConfig(Protocol):
    """The numbers that pools and graphs are made by."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Model(nn.Module):
    """From token ids to logits."""

    config: ModelConfig
    rotations: Tensor  # [num_tables, max_positions, head_dim]; no table where nothing is rotated

    def forward(self, token_ids: Tensor, state: ForwardState, logit_tokens: Tensor) -> Tensor:
        """The final hidden states at `logit_tokens`: ``[num_logits, hidden_size]``."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]`` in float32."""
        raise NotImplementedError
