import math

import pytest
import torch

from octavo.kernels.reference.philox import gumbel_noise, philox4x32, uniform

ONES = 0xFFFFFFFF
# The known answers that the generator's authors publish.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in philox4x32(words(counter), words(key))) == answer


def test_noise_takes_its_bits_from_key_and_counter() -> None:
    seed, position, sample, token = 0xA409382200000005, 9, 3, 4711
    key = words((seed & ONES, seed >> 32))
    bits = philox4x32(words((position, sample, token // 4, 0)), key)[token % 4]
    share = ((int(bits) >> 9) + 0.5) / 2**23
    signed = seed - (1 << 64)  # the same bits as int64
    found = gumbel_noise(
        torch.tensor([signed]),
        torch.tensor([position]),
        torch.tensor([sample]),
        torch.tensor([[token]]),
    )
    assert float(found) == pytest.approx(-math.log(-math.log(share)), rel=1e-5)


def test_uniform_stays_inside_the_open_interval() -> None:
    shares = uniform(torch.tensor([0, ONES]))
    assert float(shares[0]) == 2**-24
    assert float(shares[1]) == 1 - 2**-24
    assert torch.isfinite(-torch.log(-torch.log(shares))).all()


def test_noise_has_the_moments_of_gumbel() -> None:
    one = torch.tensor([5])
    noise = gumbel_noise(one, one, one, torch.arange(100_000)[None]).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
