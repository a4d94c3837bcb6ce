import random
from pathlib import Path

import pytest
from loadgen.lengths import InputError, Lengths, read_pairs, read_trace, sample_pairs
from shared_files import shared


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    return path


def test_pairs_are_filtered_by_total_and_by_zero(tmp_path: Path) -> None:
    path = write(tmp_path, "prompt_tokens,output_tokens\n5,5\n0,4\n4,0\n6,5\n1,9\n")
    assert read_pairs(path, max_total=10) == [Lengths(5, 5), Lengths(1, 9)]
    assert read_pairs(path) == [Lengths(5, 5), Lengths(6, 5), Lengths(1, 9)]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "output_tokens,note,prompt_tokens\n7,x,3\n")
    assert read_pairs(path) == [Lengths(prompt=3, output=7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_tokens\n3\n", "the header lacks output_tokens"),
        ("", "the header lacks prompt_tokens, output_tokens"),
        ("prompt_tokens,output_tokens\n1,2\n3,many\n", "line 3: '3', 'many'"),
        ("prompt_tokens,output_tokens\n3\n", "line 2: '3', ''"),
        ("prompt_tokens,output_tokens\n30,1\n", r"prompt \+ output <= 10"),
    ],
)
def test_bad_pairs_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_pairs(write(tmp_path, text), max_total=10)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.csv: No such file"):
        read_pairs(tmp_path / "absent.csv")


def test_trace_starts_at_its_first_kept_request(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:40.0000000,9000,44\n"
        "2023-11-16 18:15:46.5000000,374,44\n"
        "2023-11-16 18:15:50.7500000,396,109\n",
    )
    arrivals = read_trace(path, max_total=600)
    assert [arrival.at for arrival in arrivals] == [0.0, 4.25]
    assert [arrival.lengths for arrival in arrivals] == [Lengths(374, 44), Lengths(396, 109)]


def test_trace_takes_plain_seconds_and_refuses_descending_times(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    assert [a.at for a in read_trace(write(tmp_path, header + "1.5,1,1\n4,2,2\n"))] == [0.0, 2.5]
    with pytest.raises(InputError, match="TIMESTAMP descends"):
        read_trace(write(tmp_path, header + "4,1,1\n1.5,2,2\n"))
    with pytest.raises(InputError, match="line 2: 'noon'"):
        read_trace(write(tmp_path, header + "noon,1,1\n"))


def test_sampling_repeats_only_when_it_must() -> None:
    pairs = [Lengths(index, 1) for index in range(1, 11)]
    assert sorted(sample_pairs(pairs, 10, random.Random(1))) == pairs
    many = sample_pairs(pairs, 25, random.Random(1))
    assert len(many) == 25 and set(many) <= set(pairs)
    assert sample_pairs(pairs, 4, random.Random(1)) == sample_pairs(pairs, 4, random.Random(1))
    assert sample_pairs(pairs, 4, random.Random(1)) != sample_pairs(pairs, 4, random.Random(2))


def test_published_lengths_have_their_published_means() -> None:
    pairs = read_pairs(shared("traces/sharegpt_lengths.csv"))
    assert len(pairs) == 79_725
    assert sum(pair.prompt for pair in pairs) / len(pairs) == pytest.approx(161.2, abs=0.2)
    assert sum(pair.output for pair in pairs) / len(pairs) == pytest.approx(338.0, abs=0.2)


def test_published_trace_is_read_whole() -> None:
    arrivals = read_trace(shared("traces/azure_llm_2023_conv.csv"))
    assert len(arrivals) == 19_366
    assert arrivals[1].at == pytest.approx(4.314579, abs=1e-6)
    assert arrivals[-1].at == pytest.approx(3500, abs=120)  # an hour of service
