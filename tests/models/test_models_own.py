"""Own checkpoints: any number of stages, any name of a modality, all kinds; what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from edgefl.data.readers import target
from edgefl.errors import ModelError, StoreError
from edgefl.models.check import spec_problems
from edgefl.models.checkpoints import check_pretrained, initial_parts
from edgefl.models.own_checkpoint import own_parts, save_encoders
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, is_encoder, part_names
from edgefl.models.staged import StagedModel, build
from edgefl.storage.checkpoint_paths import is_own

torch.set_num_threads(1)

SMALL = {"width": 8, "depth": 4, "heads": 2}
KINDS = {
    "sensor": EncoderSpec(kind="sensor", input_shape=(10, 3), patch=4, **SMALL),
    "vision": EncoderSpec(kind="vision", input_shape=(8, 8, 3), patch=4, **SMALL),
    "text": EncoderSpec(kind="text", input_shape=(6,), vocabulary=20, **SMALL),
    "bert": EncoderSpec(kind="text", input_shape=(6,), vocabulary=20, arch="bert", **SMALL),
    "audio": EncoderSpec(kind="audio", input_shape=(12, 10), patch=4, **SMALL),
}


def model_of(encoders: dict[str, EncoderSpec], stages: int, sharing: str = "separate", seed: int = 0) -> StagedModel:
    """Encoders with weights that show a wrong place: no bias at zero, no norm at one."""
    spec = ModelSpec(encoders, stages=stages, head=HeadSpec(8, 4), encoder_sharing=sharing)  # type: ignore[arg-type]
    model = build(spec, [part for part in part_names(spec) if is_encoder(part)], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def started(model: StagedModel, path: Path, encoders: dict[str, EncoderSpec], stages: int) -> StagedModel:
    """A model of these encoders and stages that starts from ``model``'s encoders, written to ``path``."""
    save_encoders(path, model)
    named = {m: msgspec.structs.replace(e, pretrained=str(path)) for m, e in encoders.items()}
    spec = msgspec.structs.replace(model.spec, encoders=named, stages=stages)
    made = build(spec, seed=9)
    check_pretrained(spec)
    for part, tensors in initial_parts(spec, seed=9):
        load_part(made, part, tensors)
    return made.eval()


def inputs(encoder: EncoderSpec, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if encoder.kind == "text":
        return torch.randint(0, 20, (rows, 6), generator=generator)
    return torch.rand((rows, *encoder.input_shape), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_other_stages_and_names_compute_the_same(kind: str, tmp_path: Path):
    encoder = KINDS[kind]
    model = model_of({"a": encoder}, stages=2)
    made = started(model, tmp_path / "a.safetensors", {"b": encoder, "c": encoder}, stages=4)
    x = inputs(encoder)
    for modality in "bc":
        torch.testing.assert_close(made.encode(modality, x), model.encode("a", x), atol=0, rtol=0)
    head = build(made.spec, ["head/b"], seed=9)
    assert all(np.array_equal(v, part_tensors(made, "head/b")[n]) for n, v in part_tensors(head, "head/b").items())


def test_names_by_hand(tmp_path: Path):
    """Four blocks in two stages: block 1 (from 0) of stage 2 is block (2 - 1) * 2 + 1 = 3 of the encoder."""
    model = model_of({"acc": KINDS["sensor"]}, stages=2)
    save_encoders(tmp_path / "acc.safetensors", model)
    tensors = load_file(tmp_path / "acc.safetensors")
    np.testing.assert_array_equal(
        tensors["block/3|qkv.weight"], part_tensors(model, "acc/stage2")["blocks.1.qkv.weight"]
    )
    np.testing.assert_array_equal(tensors["embed|cls_token"], part_tensors(model, "acc/embed")["cls_token"])
    np.testing.assert_array_equal(tensors["norm|bias"], part_tensors(model, "acc/norm")["bias"])
    assert {name.partition("|")[0] for name in tensors} == {"embed", "norm", *(f"block/{i}" for i in range(4))}
    with safe_open(tmp_path / "acc.safetensors", framework="numpy") as file:
        about = file.metadata()
    assert about["sharing"] == "separate"
    encoders = msgspec.json.decode(about["encoders"], type=dict[str, EncoderSpec])
    assert encoders == {"": KINDS["sensor"]}


@torch.no_grad()
def test_a_multiway_pair_starts_with_its_shared_attention(tmp_path: Path):
    pair = {"image": KINDS["vision"], "audio": KINDS["audio"]}
    model = model_of(pair, 2, "multiway")
    made = started(model, tmp_path / "pair.safetensors", pair, stages=4)
    x = {m: inputs(encoder) for m, encoder in pair.items()}
    rows = {"image": None, "audio": None}
    for m, h in model.encode_batch(x, rows, 3).items():
        torch.testing.assert_close(made.encode_batch(x, rows, 3)[m], h, atol=0, rtol=0)
    names = load_file(tmp_path / "pair.safetensors").keys()
    assert {"shared/block/3|qkv.weight", "image/block/3|mlp.0.weight", "audio/norm|weight"} <= set(names)


@torch.no_grad()
def test_a_multiway_file_of_one_modality_starts_both(tmp_path: Path):
    sensor = KINDS["sensor"]
    model = model_of({"acc": sensor}, 2, "multiway")
    made = started(model, tmp_path / "acc.safetensors", {"acc": sensor, "gyro": sensor}, stages=1)
    x = inputs(sensor)
    for m in ("acc", "gyro"):
        torch.testing.assert_close(made.encode(m, x), model.encode("acc", x), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sensor", {"width": 16}, r"'embed\|cls_token' has shape \[1, 1, 8\], but the model needs \[1, 1, 16\]"),
        ("sensor", {"depth": 6}, r"'block/4\|attention_norm.weight' \[8\] is missing"),
        ("sensor", {"depth": 2}, r"'block/2\|attention_norm.bias' \[8\] is not in the model"),
        ("sensor", {"mlp_ratio": 2.0}, r"'block/0\|mlp.0.weight' has shape \[32, 8\], but the model needs \[16, 8\]"),
        ("sensor", {"heads": 4}, "its heads = 2, but the model has 4"),
        ("text", {"pool": "mean"}, "its pool = token, but the model has mean"),
        ("sensor", {"input_shape": (11, 3)}, r"its input_shape = \[10, 3\], but the model has \[11, 3\]"),
        ("audio", {"stride": 3}, r"'embed\|embeddings.position_embeddings' has shape \[1, 8, 8\].*\[1, 11, 8\]"),
        ("vision", {"patch": 2}, r"'embed\|embeddings.position_embeddings' has shape \[1, 5, 8\].*\[1, 17, 8\]"),
        ("text", {"vocabulary": 30}, r"word_embeddings.weight' has shape \[20, 8\], but the model needs \[30, 8\]"),
        ("text", {"arch": "bert"}, r"'embed\|embeddings.token_type_embeddings.weight' \[2, 8\] is missing"),
        ("vision", {"kind": "sensor", "input_shape": (8, 3)}, "it is a vision encoder, but the model's is sensor"),
    ],
)
def test_the_first_difference_is_named(kind: str, changes: dict[str, object], message: str, tmp_path: Path):
    path = tmp_path / "own.safetensors"
    save_encoders(path, model_of({"m": KINDS[kind]}, 2))
    wanted = msgspec.structs.replace(KINDS[kind], pretrained=str(path), **changes)
    spec = ModelSpec({"m": wanted}, stages=2)
    for use in (check_pretrained, lambda spec: list(initial_parts(spec))):
        with pytest.raises(ModelError, match=message) as caught:
            use(spec)
        assert "for modality 'm'" in caught.value.message


def test_the_stride_of_audio_patches_is_compared(tmp_path: Path):
    """Patches of 4 in 12 x 10 by strides of 4 and 3: (3, 2) and (3, 3); in 8 x 8 by 4 and 3 both (2, 2)."""
    encoder = msgspec.structs.replace(KINDS["audio"], input_shape=(8, 8))
    path = tmp_path / "own.safetensors"
    save_encoders(path, model_of({"m": encoder}, 2))
    same = msgspec.structs.replace(encoder, pretrained=str(path), stride=4)  # 0 means as wide as a patch
    check_pretrained(ModelSpec({"m": same}, stages=2))
    with pytest.raises(ModelError, match="its stride = 4, but the model has 3"):
        check_pretrained(ModelSpec({"m": msgspec.structs.replace(same, stride=3)}, stages=2))


def test_sharing_and_names_have_to_fit(tmp_path: Path):
    path = tmp_path / "own.safetensors"
    sensor = msgspec.structs.replace(KINDS["sensor"], pretrained=str(path))
    pair = {"a": sensor, "b": sensor}
    save_encoders(path, model_of({"acc": KINDS["sensor"]}, 2))
    with pytest.raises(ModelError, match="its blocks are separate, the model's multiway"):
        check_pretrained(ModelSpec(pair, stages=2, encoder_sharing="multiway"))
    save_encoders(path, model_of({"acc": KINDS["sensor"], "b": KINDS["sensor"]}, 2))
    with pytest.raises(ModelError, match="for modality 'a' does not fit the model: it holds the modalities acc, b"):
        check_pretrained(ModelSpec(pair, stages=2))


def test_multiway_encoders_name_one_own_file():
    def faults(a: str, b: str) -> list[tuple[str, str]]:
        encoders = {m: msgspec.structs.replace(KINDS["sensor"], pretrained=p) for m, p in (("a", a), ("b", b))}
        found = spec_problems(ModelSpec(encoders, stages=2, head=HeadSpec(8, 4), encoder_sharing="multiway"))
        return [(p.path, p.message) for p in found]

    assert faults("", "") == faults("x.safetensors", "x.safetensors") == []
    for a, b in (("x.safetensors", "y.safetensors"), ("x.safetensors", ""), ("", "x.safetensors")):
        ((path, message),) = faults(a, b)
        assert path == "encoders.b.pretrained"
        assert "one file" in message
    assert [path for path, _ in faults("some/name", "some/name")] == ["encoders.a.pretrained", "encoders.b.pretrained"]


@pytest.mark.parametrize("content", ["absent", "damaged", "foreign", "empty", "folder", "half"])
def test_files_that_are_no_own_checkpoints(content: str, tmp_path: Path):
    path = tmp_path / "own.safetensors"
    if content == "damaged":
        path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not a header")
    elif content == "foreign":
        save_file({"weight": np.zeros(2, np.float32)}, path, metadata={"format": "pt"})
    elif content == "empty":
        about = {"format": "edgefl-encoders/1", "encoders": "{}", "sharing": "none"}
        save_file({"weight": np.zeros(2, np.float32)}, path, metadata=about)
    elif content == "folder":
        path.mkdir()
    elif content == "half":
        save_encoders(path, model_of({"m": KINDS["sensor"]}, 2))
        with safe_open(path, framework="numpy") as file:
            about = file.metadata()
        tensors = load_file(path)
        save_file({n: v.astype(np.float16) for n, v in tensors.items()}, path, metadata=about)
    words = {
        "absent": "cannot be read: there is no such file",
        "folder": "cannot be read: there is no such file",
        "damaged": "cannot be read",
        "empty": "does not say that it is of the form edgefl-encoders/1",
        "foreign": "does not say that it is of the form edgefl-encoders/1",
        "half": r"the tensor '.*' is F16, not F32",
    }[content]
    spec = ModelSpec({"m": msgspec.structs.replace(KINDS["sensor"], pretrained=str(path))}, stages=2)
    with pytest.raises(ModelError, match=words):
        list(own_parts(spec, "m"))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "own.safetensors"
    path.write_bytes(b"old")

    def full(*_args: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgefl.storage.disk.write_all", full)
    with pytest.raises(StoreError, match=r"cannot write .*No space left"):
        save_encoders(path, model_of({"m": KINDS["sensor"]}, 2))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"old"


def test_own_files_bring_no_tokenizer_and_no_spectrogram():
    """Their encoders were trained on this project's own ids and spectrograms."""
    assert is_own("some/file.safetensors")
    assert not is_own("some/folder")
    text = target(msgspec.structs.replace(KINDS["text"], pretrained="x.safetensors"))
    assert text.tokenize is not None
    assert text.tokenize("a", 3).tolist()[0] == 1
    assert target(msgspec.structs.replace(KINDS["audio"], pretrained="x.safetensors")).kind == "audio"
    assert target(msgspec.structs.replace(KINDS["audio"], pretrained="some/ast")).kind == "features"
