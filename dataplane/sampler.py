"""From the logits of a plan's draws to tokens and their log-probabilities."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.dataplane.slots import Ints, Slots
from octavo.kernels.reference import sampling as ops
from octavo.kernels.reference.sampling import DrawParams
from octavo.kernels.table import Kernels
from octavo.proto.plan import Candidates, DrawLogprobs, Sampling
from octavo.proto.wire import Int32s, float32s, int32s


@dataclass(frozen=True)
class Draws:
    """A token for each draw."""

    tokens: Int32s
    logprobs: DrawLogprobs | None
    candidates: Candidates | None


def draw(logits: Tensor, slots: Slots, drawn: Ints, kernels: Kernels) -> Draws:
    """Draws one token for each of the slots `drawn`; appends nothing.

    Args:
        logits: ``[num_draws, vocab_size]`` float32, row i for ``drawn[i]``; left as they are.
    """
    tokens = logits.argmax(dim=1)
    searching = slots.draws.candidates[drawn] > 0
    special = np.flatnonzero(
        ~searching & (slots.draws.edits[drawn] | (slots.draws.temperature[drawn] > 0))
    )
    if len(special):
        rows = torch.from_numpy(special).to(logits.device)
        own = logits[rows]  # a copy: reported log-probabilities are of the raw logits
        _edit(own, slots, drawn[special])
        params = _draw_params(slots, drawn[special], logits.device)
        tokens[rows] = kernels.sample(own, params)
    asked = np.flatnonzero(slots.draws.wants_logprobs[drawn])
    logprobs = _logprobs(logits, tokens, slots, drawn, asked, kernels) if len(asked) else None
    return Draws(
        tokens=tokens.cpu().numpy().astype(np.int32),
        logprobs=logprobs,
        candidates=_candidates(logits, slots, drawn, np.flatnonzero(searching), kernels),
    )


def _candidates(
    logits: Tensor,
    slots: Slots,
    drawn: Ints,
    asked: np.ndarray[tuple[int], np.dtype[np.int64]],
    kernels: Kernels,
) -> Candidates | None:
    """The best continuations of the draws `asked`: edits apply to log-probabilities, as in
    Hugging Face's beam search."""
    if not len(asked):
        return None
    own = torch.log_softmax(logits[torch.from_numpy(asked).to(logits.device)], dim=1)
    _edit(own, slots, drawn[asked])
    counts = [min(int(slots.draws.candidates[drawn[i]]), logits.shape[1]) for i in asked]
    ids = kernels.top_ids(own, max(counts))
    best = own.gather(1, ids).cpu().numpy()
    ranked = ids.cpu().numpy()
    return Candidates(
        draws=int32s(asked),
        counts=int32s(counts),
        ids=int32s(np.concatenate([ranked[i, :k] for i, k in enumerate(counts)])),
        logprobs=float32s(np.concatenate([best[i, :k] for i, k in enumerate(counts)])),
    )


def _draw_params(slots: Slots, drawn: Ints, device: torch.device) -> DrawParams:
    draws = slots.draws
    positions = slots.lengths[drawn].astype(np.int64)
    samples = slots.samples[drawn].astype(np.int64)
    return DrawParams(
        temperature=torch.from_numpy(draws.temperature[drawn]).to(device),
        top_k=torch.from_numpy(draws.top_k[drawn]).to(device),
        top_p=torch.from_numpy(draws.top_p[drawn]).to(device),
        min_p=torch.from_numpy(draws.min_p[drawn]).to(device),
        seeds=torch.from_numpy(draws.seed[drawn]).to(device),
        positions=torch.from_numpy(positions).to(device),
        samples=torch.from_numpy(samples).to(device),
    )


# -- edits: bias, then min_tokens, then penalties ---------------------------------------------------


def _edit(logits: Tensor, slots: Slots, drawn: Ints) -> None:
    for row, slot in enumerate(drawn.tolist()):
        if slots.draws.edits[slot]:
            one = logits[row : row + 1]
            sampling = slots.sampling(slot)
            _bias(one, sampling)
            if len(slots.outputs(slot)) < sampling.min_tokens:
                _forbid_endings(one, sampling)
            _penalize(one, sampling, slots.history(slot), slots.outputs(slot))


def _bias(logits: Tensor, sampling: Sampling) -> None:
    if len(sampling.bias_ids):
        ids = _tensor(sampling.bias_ids, logits)
        ops.add_bias(logits, torch.zeros_like(ids), ids, _tensor(sampling.bias_values, logits))


def _forbid_endings(logits: Tensor, sampling: Sampling) -> None:
    """No token that would end the sequence; with `ignore_eos` an EOS does not end it."""
    endings = [sampling.stop_token_ids]
    if not sampling.ignore_eos:
        endings.append(sampling.eos_token_ids)
    ids = _tensor(np.unique(np.concatenate(endings)), logits)
    ops.forbid(logits, torch.zeros_like(ids), ids)


def _penalize(logits: Tensor, sampling: Sampling, history: Ints, outputs: Ints) -> None:
    if sampling.repetition_penalty != 1.0:
        ids = _tensor(np.unique(history), logits)
        penalty = torch.tensor(sampling.repetition_penalty, device=logits.device)
        ops.penalize_repetition(logits, torch.zeros_like(ids), ids, penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(outputs):
        unique, counts = np.unique(outputs, return_counts=True)
        ids = _tensor(unique, logits)
        presence = torch.tensor(sampling.presence_penalty, device=logits.device)
        frequency = torch.tensor(sampling.frequency_penalty, device=logits.device)
        rows = torch.zeros_like(ids)
        ops.penalize_output(logits, rows, ids, _tensor(counts, logits), presence, frequency)


def _tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], like: Tensor) -> Tensor:
    """On the device of `like`; integers as int64, as indexing wants them."""
    dtype = np.int64 if np.issubdtype(values.dtype, np.integer) else values.dtype
    return torch.tensor(values.astype(dtype), device=like.device)


# -- log-probabilities ------------------------------------------------------------------------------


def _logprobs(
    logits: Tensor,
    tokens: Tensor,
    slots: Slots,
    drawn: Ints,
    asked: np.ndarray[tuple[int], np.dtype[np.int64]],
    kernels: Kernels,
) -> DrawLogprobs:
    counts = [min(slots.sampling(int(drawn[i])).logprobs or 0, logits.shape[1]) for i in asked]
    rows = torch.from_numpy(asked).to(logits.device)
    scored, ids, best = score(logits[rows], tokens[rows], max(counts), kernels)
    return DrawLogprobs(
        draws=int32s(asked),
        logprobs=scored,
        top_counts=int32s(counts),
        top_ids=int32s(np.concatenate([ids[i, :k] for i, k in enumerate(counts)])),
        top_logprobs=float32s(np.concatenate([best[i, :k] for i, k in enumerate(counts)])),
    )


Scores = tuple[
    np.ndarray[tuple[int], np.dtype[np.float32]],
    np.ndarray[tuple[int, int], np.dtype[np.int32]],
    np.ndarray[tuple[int, int], np.dtype[np.float32]],
]


def score(logits: Tensor, tokens: Tensor, k: int, kernels: Kernels) -> Scores:
    """Log-probabilities of `tokens` under raw logits, and the k best of each row, best first.

    Returns:
        ``[n]`` log-probabilities, ``[n, k]`` ids and ``[n, k]`` log-probabilities.
    """
    normalizer = ops.log_normalizer(logits)[:, None]
    ids = kernels.top_ids(logits, k)
    best = logits.gather(1, ids) - normalizer
    own = (logits.gather(1, tokens.long()[:, None]) - normalizer).squeeze(1)
    return own.cpu().numpy(), ids.cpu().numpy().astype(np.int32), best.cpu().numpy()
