"""Every family computes what Hugging Face's own classes do, in chunks and decodes, on both engines."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from forwards import SIZE, batch_of_rows
from safetensors.torch import load_file, save_file
from tiny_llama import VOCAB, hf_logits, prompt_of, save_tiny_llama, tiny_llama

from octavo.common.modelfiles import ModelError, ModelFiles, open_model
from octavo.dataplane.engine import Engine
from octavo.dataplane.engines.choice import load_engine
from octavo.dataplane.engines.openvino.engine import OpenVinoEngine
from octavo.dataplane.engines.recorded_layers import RecordedLayers
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.loading.weights import open_weights
from octavo.dataplane.models import registry
from octavo.dataplane.models.decoder import turning_rows
from octavo.dataplane.models.registry import family_of
from octavo.dataplane.models.rope import rope_table
from octavo.dataplane.models.shard import ALONE
from octavo.dataplane.options import WorkerOptions
from octavo.kernels.reference.rotary import inverse_frequencies, rotary_table
from octavo.kernels.table import CPU

# The torch engine with the native kernels, as it is on CPUs; with torch's own; OpenVINO.
ENGINES = ("torch", "torch-without-native", "openvino")
# Between the operations of the others torch computes: norms of heads, GELU, LayerNorm.
RECORDED = ("llama", "mistral", "qwen2", "phi3")
BOTH = prompt_of(101)[:98], prompt_of(70, 1)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
OPT = {"ffn_dim": 56, "init_std": 0.2, "word_embed_proj_dim": 48, "tie_word_embeddings": True}
GPT2 = {"n_positions": 256, "n_layer": 2, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}

# The class's prefix, then its configuration: groups of 3 and 7, heads of 80 and others, tied or not.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80},
    ),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 80}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}},
    ),
    "llama-yarn-factor": (
        "Llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8, "beta_slow": 2}},
    ),
    "mistral": ("Mistral", {"sliding_window": 19, "head_dim": 80}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": (
        "Qwen2",
        {"num_attention_heads": 14, "hidden_size": 84, "tie_word_embeddings": True},
    ),
    "qwen2-some-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 80}),
    "qwen3-tied": ("Qwen3", {"head_dim": 22, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 80,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 29,
            "query_pre_attn_scalar": 17,
        },
    ),
    "gemma3-scaled": (
        "Gemma3Text",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 14,
            "hidden_size": 84,
            "sliding_window_pattern": 2,
            "sliding_window": 40,
            "final_logit_softcapping": 2.5,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
        },
    ),
    "opt": ("OPT", OPT),
    "opt-gelu": (
        "OPT",
        OPT
        | {
            "hidden_size": 77,
            "word_embed_proj_dim": 77,
            "num_attention_heads": 7,
            "activation_function": "gelu",
        },
    ),
    "gpt2": ("GPT2", GPT2 | {"n_head": 3, "n_embd": 240}),
    "gpt2-inner": (
        "GPT2",
        GPT2 | {"n_head": 7, "n_embd": 77, "n_inner": 56, "layer_norm_epsilon": 0.1},
    ),
    "phi3": ("Phi3", {"hidden_size": 480, "sliding_window": 23}),
    "phi3-partial": (
        "Phi3",
        {
            "hidden_size": 480,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-tied": (
        "Phi3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
}


_CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def hf_model_of(prefix: str, changes: dict[str, Any]) -> Any:
    """Two layers with random weights; what starts at a constant, norms and biases, random too."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2 if changes.get("hidden_size", 0) < 100 else 0.06,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    changes = {key: {"rope_theta": 10_000.0} | value if key == "rope_parameters" else value
               for key, value in changes.items()}  # fmt: skip
    own = {} if prefix == "GPT2" else settings
    shared = {key: settings[key] for key in ("vocab_size", "initializer_range", "eos_token_id")}
    config = getattr(transformers, f"{prefix}Config")(**(shared | own | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{_CLASSES.get(prefix, f'{prefix}ForCausalLM')}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"norm\.weight|ln_.\.weight", name):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_()
    model.train(False)
    return model


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, ModelFiles]]:
    """Hugging Face's model of a case, and its files."""

    @functools.cache
    def make(name: str) -> tuple[Any, ModelFiles]:
        model = hf_model_of(*CASES[name])
        folder = tmp_path_factory.mktemp("families") / name
        model.save_pretrained(folder)
        return model, open_model(str(folder))

    return make


def engine_of(files: ModelFiles, name: str) -> Engine:
    if name == "torch-without-native":
        return TorchEngine(files, "cpu", "float32", CPU)
    return load_engine(files, WorkerOptions(device="cpu", engine=name, threads=1))


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    """Loading an engine sets torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chunks_and_decodes(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of BOTH in permuted blocks: chunks of one beside chunks and decodes of the other."""
    first, second = BOTH
    tables = [7, 2, 8, 4], [0, 5, 3]
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    steps = [((0, 41), (0, 64)), ((41, 96), (64, 65)), ((96, 97), (65, 69)), ((97, 98), (69, 70))]
    for steps_of_both in steps:
        rows = [
            (tokens[:end], begin, table)
            for tokens, table, (begin, end) in zip((first, second), tables, steps_of_both, strict=True)
        ]
        counts = [end - begin for begin, end in steps_of_both]
        logits = engine.logits(engine.forward(batch_of_rows(rows, list(range(sum(counts))))))
        for part, own in zip(torch.split(logits, counts), found, strict=True):
            own.append(part)
    return torch.cat(found[0]), torch.cat(found[1])


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_face(
    case: Callable[[str], tuple[Any, ModelFiles]], name: str, engine_name: str
) -> None:
    model, files = case(name)
    engine = engine_of(files, engine_name)
    engine.make_pools(9, SIZE, 0)
    for tokens, found in zip(BOTH, chunks_and_decodes(engine), strict=True):
        wanted = hf_logits(model, tokens)
        assert wanted.std() > 0.3, "logits this small would agree with anything"
        assert float((found - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_recorded_layers_compute_the_same_bits(
    case: Callable[[str], tuple[Any, ModelFiles]], name: str
) -> None:
    engine = TorchEngine(case(name)[1], "cpu", "float32")
    engine.make_pools(9, SIZE, 0)
    wanted = chunks_and_decodes(engine)
    engine.warm_up(2)
    assert isinstance(engine._layers, RecordedLayers) == (name.split("-")[0] in RECORDED)
    assert all(map(torch.equal, chunks_and_decodes(engine), wanted))


def test_a_window_matters(case: Callable[[str], tuple[Any, ModelFiles]], tmp_path: Path) -> None:
    """What the comparison above would not see if prompts were shorter than the window."""
    model, _ = case("mistral")
    folder = tmp_path / "wide"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    engine = engine_of(open_model(str(folder)), "torch")
    engine.make_pools(9, SIZE, 0)
    tokens = prompt_of(60)
    logits = engine.logits(engine.forward(batch_of_rows([(tokens, 0, [3, 1])], [18, 19])))
    gaps = (logits - hf_logits(model, tokens)[18:20]).abs().amax(dim=-1)
    assert gaps[0] < 1e-4 < 1e-2 < gaps[1]


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "phi3", "gemma3", "opt", "gpt2"])
def test_auto_takes_openvino_for_other_caches(
    case: Callable[[str], tuple[Any, ModelFiles]], name: str
) -> None:
    options = WorkerOptions(device="cpu", engine="auto", threads=1, kv_dtype="float16")
    assert load_engine(case(name)[1], options).describe().engine == "openvino"


# -- other files --------------------------------------------------------------------------------------


def gap_of(model: Any, path: Path, packing: str = "none", openvino: bool = False) -> float:
    """The largest difference of logits from Hugging Face's, against their spread."""
    files, tokens = open_model(str(path)), prompt_of(70)
    engine: Engine = TorchEngine(files, "cpu", "float32", packing=packing)
    if openvino:
        engine = OpenVinoEngine(files, packing, "float32", threads=1)
    engine.make_pools(3, SIZE, 0)
    logits = engine.logits(engine.forward(batch_of_rows([(tokens, 0, [2, 0, 1])], list(range(70)))))
    wanted = hf_logits(model, tokens)
    return float((logits - wanted).abs().max() / wanted.std())


def write_family(model: Any, path: Path, family: str) -> Path:
    """The model as a GGUF file in float32, for families whose rows stay in their order."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        offset = 1.0 if family == "gemma3" and "norm" in name else 0.0
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(own_name, (tensor + offset).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("prefix", "family", "changes"),
    [
        ("Qwen2", "qwen2", {}),
        ("Qwen3", "qwen3", {"head_dim": 80}),
        ("Phi3", "phi3", CASES["phi3-partial"][1]),
        ("Gemma3Text", "gemma3", {"num_hidden_layers": 7, "head_dim": 24, "sliding_window": 29,
                                  "query_pre_attn_scalar": 24, "tie_word_embeddings": True}),
        ("Gemma3Text", "gemma3", {"num_hidden_layers": 7, "head_dim": 24, "sliding_window": 29,
                                  "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
                                  "final_logit_softcapping": 2.5,
                                  "rope_parameters": CASES["gemma3-scaled"][1]["rope_parameters"]
                                  | {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    ],
)  # fmt: skip
def test_gguf_of_families(prefix: str, family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model_of(prefix, changes)
    assert gap_of(model, write_family(model, tmp_path / "a.gguf", family)) < 1e-4


@pytest.mark.parametrize("openvino", [False, True], ids=["native", "openvino"])
def test_rows_of_small_integers_turn_too(
    case: Callable[[str], tuple[Any, ModelFiles]], openvino: bool
) -> None:
    model, files = case("phi3-partial")
    assert 1e-4 < gap_of(model, files.path, "int8", openvino) < 0.3


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "opt", "gpt2"])
def test_both_engines_compute_alike_with_small_integers(
    case: Callable[[str], tuple[Any, ModelFiles]], name: str
) -> None:
    files, tokens = case(name)[1], prompt_of(40)
    both = []
    for engine in (
        TorchEngine(files, "cpu", "float32", packing="int8"),
        OpenVinoEngine(files, "int8", "float32", threads=1),
    ):
        engine.make_pools(2, SIZE, 0)
        hidden = engine.forward(batch_of_rows([(tokens, 0, [1, 0])], list(range(40))))
        both.append(engine.logits(hidden).clone())
    assert float((both[0] - both[1]).abs().max()) < 1e-4


def test_gpt2_names_without_a_prefix(
    case: Callable[[str], tuple[Any, ModelFiles]], tmp_path: Path
) -> None:
    model, files = case("gpt2")
    shutil.copytree(files.path, tmp_path / "bare")
    path = tmp_path / "bare" / "model.safetensors"
    tensors = load_file(path)
    save_file({name.removeprefix("transformer."): value for name, value in tensors.items()}, path)
    assert gap_of(model, path.parent) < 1e-4


def test_the_worked_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its family is Qwen3 with a window on every second layer."""
    page = Path(__file__).resolve().parents[2] / "docs" / "models.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code[0], str(page), "exec"), names)
    monkeypatch.setitem(registry._FAMILIES, "owl", names["owl"])
    types = ["full_attention", "sliding_attention"]
    model = hf_model_of(
        "Qwen3", {"layer_types": types, "use_sliding_window": True, "sliding_window": 31}
    )
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "use_sliding_window"):
        config.pop(key)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "owl"}))
    assert gap_of(model, tmp_path) < 1e-4


# -- rotary tables ------------------------------------------------------------------------------------


def test_rows_that_turn_come_first_in_both_halves() -> None:
    order = turning_rows(8, 4, num_turning=2, num_other=1).tolist()
    assert order[:8] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert order[8:16] == [8 + row for row in order[:8]]
    assert order[16:] == list(range(16, 24))


def test_gguf_keys_say_the_same_as_a_configuration(tmp_path: Path) -> None:
    plain = open_model(str(save_tiny_llama(tiny_llama(), tmp_path / "plain")))
    scaled = tiny_llama(rope_parameters=YARN | {"rope_theta": 10_000.0, "beta_fast": 8})
    wanted = open_model(str(save_tiny_llama(scaled, tmp_path / "scaled")))
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 48,
        "llama.rope.scaling.yarn_beta_fast": 8.0,
    }
    tables = [rope_table(files, 8, 8, 64) for files in (replace(plain, gguf=keys), wanted, plain)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


@pytest.mark.parametrize("values", [4, 3])
def test_gguf_divisors_of_frequencies(values: int, tmp_path: Path) -> None:
    path = tmp_path / "scaled.gguf"
    divisors = np.arange(1, values + 1, dtype=np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_token_list(["a"])
    writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = open_model(str(path))
    if values == 4:
        wanted = rotary_table(inverse_frequencies(8, 10_000.0) / torch.from_numpy(divisors), 64)
        assert torch.equal(rope_table(files, 8, 8, 64), wanted)
    else:
        with pytest.raises(ModelError, match=r"scaled\.gguf: tensor rope_freqs\.weight is not \[4\]"):
            rope_table(files, 8, 8, 64)


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "type 'longrope' is not supported"),
        ("llama", {"rope_parameters": YARN | {"factor": None}}, "type 'yarn', `factor` is missing"),
        ("llama", {"rope_parameters": YARN | {"factor": "2"}}, "`factor` is missing or not positive"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "is not above"),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "`partial_rotary_factor` is not supported .* 'llama'",
        ),
        ("mistral", {"sliding_window": -1}, "`sliding_window` in the configuration"),
        (
            "qwen2",
            {"layer_types": ["full_attention"]},
            "`layer_types` does not name .* each of 2 layers",
        ),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, "`layer_types` does not name"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "sliding layers, without `sliding_window`",
        ),
        ("qwen3", {"head_dim": 40}, r"self_attn\.q_proj\.weight has the shape"),
        ("phi3", {"partial_rotary_factor": 0.34, "rope_parameters": None}, "must be an even number"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` is not supported"),
        ("gemma3", {"hidden_activation": "relu"}, "the activation 'relu'"),
        ("opt", {"do_layer_norm_before": False}, "`do_layer_norm_before` is supported only as True"),
        ("opt", {"word_embed_proj_dim": 24}, "`word_embed_proj_dim`"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "supported only as False"),
        ("gpt2", {"activation_function": "tanh"}, "the activation 'tanh' is not supported"),
        ("gpt2", {"n_head": 7}, "7 heads do not divide the hidden size 240"),
        ("phi3", {"intermediate_size": 64}, r"gate_up_proj\.weight has the shape"),
    ],
)
def test_variants_that_are_not_known_are_refused(
    case: Callable[[str], tuple[Any, ModelFiles]], name: str, changes: dict[str, Any], message: str
) -> None:
    files = case(name)[1]
    files = replace(files, config=files.config | changes)
    with pytest.raises(ModelError, match=message) as caught:
        family_of(files)(files, open_weights(files, torch.float32), CPU, ALONE)
    assert str(files.path) in str(caught.value)
